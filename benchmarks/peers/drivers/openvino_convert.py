"""Converter of a model folder to OpenVINO's IR, by its own exporter: f16 weights, which a CPU with AMX runs in bf16, or
weights that NNCF quantizes: 8 bits by output, or 4 bits in groups of 32 inputs with the head in 8, symmetric as ours.

python openvino_convert.py MODEL_FOLDER OUT_FOLDER [int8 | int4]
"""

import sys

from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig, OVWeightQuantizationConfig

SCHEMES = {"int8": {"bits": 8, "sym": True}, "int4": {"bits": 4, "sym": True, "group_size": 32, "ratio": 1.0}}

if __name__ == "__main__":
    source, out, *scheme = sys.argv[1:]
    config = OVConfig(dtype="fp16")
    if scheme:
        config = OVConfig(quantization_config=OVWeightQuantizationConfig(**SCHEMES[scheme[0]]))
    main_export(source, output=out, task="text-generation-with-past", ov_config=config)

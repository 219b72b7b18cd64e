"""Converter of a model folder to OpenVINO's IR, by its own exporter: f16 weights, which a CPU with AMX runs in bf16.

python openvino_convert.py MODEL_FOLDER OUT_FOLDER
"""

import sys

from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig

if __name__ == "__main__":
    main_export(
        sys.argv[1],
        output=sys.argv[2],
        task="text-generation-with-past",
        ov_config=OVConfig(dtype="fp16"),
    )

"""Converter of a model folder to OpenVINO's IR, by its own exporter: f16 weights, which a CPU with AMX runs in bf16, or
weights that NNCF quantizes: 8 bits by output, or 4 bits in groups of 32 inputs with the head in 8, symmetric as ours.

python openvino_convert.py MODEL_FOLDER OUT_FOLDER [int8 | int4]
"""

import shutil
import sys
from pathlib import Path

import nncf
import openvino
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig

SCHEMES = {
    "int8": {"mode": nncf.CompressWeightsMode.INT8_SYM},
    "int4": {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": 32, "ratio": 1.0},
}
"""Arguments of `nncf.compress_weights`: the exporter of 2.2.0 leaves weights as they are, whatever its settings say."""
FILE = "openvino_model.xml"


def quantize(folder: Path, scheme: str) -> None:
    """Writes the model's file once more, with quantized weights."""
    model = nncf.compress_weights(openvino.Core().read_model(folder / FILE), **SCHEMES[scheme])
    made = folder / "quantized"
    openvino.save_model(model, made / FILE, compress_to_fp16=False)
    for path in made.iterdir():
        path.replace(folder / path.name)
    shutil.rmtree(made)


if __name__ == "__main__":
    source, out, *scheme = sys.argv[1:]
    main_export(source, output=out, task="text-generation-with-past", ov_config=OVConfig(dtype="fp16"))
    for one in scheme:
        quantize(Path(out), one)

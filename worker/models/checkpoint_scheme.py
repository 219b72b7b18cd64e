"""Quantization scheme of a checkpoint in words, by the files' headers and config.json. Needs no torch."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Final

from holdfast.worker.config import Quantization
from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.models.formats.gguf_folder import is_made_of_gguf, read_index, source_of
from holdfast.worker.models.formats.quantization_rule import NOT_QUANTIZED, words_at_load, words_of
from holdfast.worker.models.formats.quantization_scheme import read_scheme
from holdfast.worker.models.text_model import served_config

_PLAIN: Final = frozenset({"F32", "F16", "BF16"})


def quantization_of(folder: Path, at_load: Quantization | None = None) -> str:
    """Quantization of the checkpoint in `folder`, in words: `GGUF Q4_1`, `AWQ int4 g128`, `none`; `at_load`: when they
    are loaded. For a GGUF file, the type that most weights have. A scheme that is not read, which a gate refuses, is
    `none` as well.
    """
    if at_load is not None:
        return words_at_load(at_load)
    if is_made_of_gguf(folder):
        return _of_gguf(folder)
    try:
        return words_of(
            read_scheme(served_config(json.loads((folder / "config.json").read_text(encoding="utf-8")), folder))
        )
    except (OSError, ValueError, AttributeError, RecursionError, UnsupportedModelError):
        return NOT_QUANTIZED


def check_quantization(folder: Path, at_load: Quantization | None) -> None:
    """Refuses to quantize a quantized checkpoint. Raises `ConfigurationError`."""
    if at_load is not None and (found := quantization_of(folder)) != NOT_QUANTIZED:
        raise ConfigurationError(
            f"model.quantization = {at_load!r}: the checkpoint in {source_of(folder)} is quantized already ({found}); "
            "leave --quantization unset, or give the checkpoint that is not quantized"
        )
    if at_load is not None and is_made_of_gguf(folder):
        raise ConfigurationError(
            f"model.quantization = {at_load!r}: {source_of(folder)} is a GGUF file, and codes are made of "
            "safetensors alone; leave --quantization unset, or give a Hugging Face folder"
        )


def _of_gguf(folder: Path) -> str:
    weights: Counter[str] = Counter()
    for tensor in read_index(folder):
        weights[tensor.kind] += math.prod(tensor.shape)
    kind, _ = weights.most_common(1)[0]
    return NOT_QUANTIZED if kind in _PLAIN else f"GGUF {kind}"

"""Rotary angles of a GGUF file, as the `rope_parameters` of a Hugging Face config.

llama.cpp writes the frequencies of Llama 3 as a tensor of factors; they are recognized as the rule that made them.
"""

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from holdfast.worker.models.formats.gguf_header import StoredTensor
from holdfast.worker.models.formats.gguf_metadata import Metadata, NotUnderstood

_FACTORS: Final = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_ORIGINAL_LENGTHS: Final = (8192, 4096, 2048, 16384, 32768)  # tokens
_LOW, _HIGH = 1.0, 4.0
"""Factors of all of Llama 3's models."""

_CLOSE: Final = 1e-4  # relative tolerance
_DEFAULT_THETA: Final = 10_000.0  # as in llama.cpp


def rope_parameters(metadata: Metadata) -> dict[str, Any]:
    """Raises `NotUnderstood` for angles of an unknown kind."""
    theta = metadata.number("rope.freq_base", _DEFAULT_THETA)
    if metadata.has(_FACTORS):
        return {"rope_theta": theta, **_llama3(metadata, theta)}
    if metadata.has(_LONG) or metadata.has(_SHORT):
        return {"rope_theta": theta, **_longrope(metadata)}
    kind = metadata.get("rope.scaling.type", "none")
    if kind == "none" and not metadata.get("rope.scale_linear"):
        return {"rope_theta": theta, "rope_type": "default"}
    factor = metadata.number("rope.scaling.factor", metadata.get("rope.scale_linear", 1.0))
    if kind in ("linear", "none"):
        return {"rope_theta": theta, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_theta": theta, "rope_type": "yarn", "factor": factor, **_yarn(metadata)}
    raise NotUnderstood(f"has rotary angles of kind {kind!r}")


def rotary_factors(metadata: Metadata) -> NDArray[np.float64]:
    """Divisors of the angles, [head / 2]. Raises `NotUnderstood` for a file that lacks them."""
    if not metadata.has(_FACTORS):
        raise NotUnderstood(f"lacks the tensor {_FACTORS}")
    return _numbers(metadata, metadata.header.tensors[_FACTORS])


def _yarn(metadata: Metadata) -> dict[str, Any]:
    keys = {
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "attention_factor": "rope.scaling.attn_factor",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }
    found = {name: metadata.get(key) for name, key in keys.items()}
    return {name: value for name, value in found.items() if value is not None}


def _llama3(metadata: Metadata, theta: float) -> dict[str, Any]:
    factors = rotary_factors(metadata)
    factor = float(factors.max())
    dim = 2 * len(factors)
    wavelengths = 2 * math.pi * theta ** (np.arange(0, dim, 2) / dim)
    for length in _ORIGINAL_LENGTHS:
        smooth = (length / wavelengths - _LOW) / (_HIGH - _LOW)
        between = 1 / ((1 - smooth) / factor + smooth)
        expected = np.where(wavelengths < length / _HIGH, 1.0, np.where(wavelengths > length / _LOW, factor, between))
        if np.allclose(factors, expected, rtol=_CLOSE):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": length,
            }
    raise NotUnderstood(f"has factors of rotary frequencies ({_FACTORS}) that are not Llama 3's")


def _longrope(metadata: Metadata) -> dict[str, Any]:
    long, short = (metadata.header.tensors.get(name) for name in (_LONG, _SHORT))
    if long is None or short is None:
        raise NotUnderstood(f"has one of {_LONG} and {_SHORT}, and not the other")
    found = {
        "rope_type": "longrope",
        "long_factor": _numbers(metadata, long).tolist(),
        "short_factor": _numbers(metadata, short).tolist(),
        "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length"),
    }
    scale = metadata.get("rope.scaling.attn_factor")
    return found if scale is None else {**found, "attention_factor": scale}


def _numbers(metadata: Metadata, tensor: StoredTensor) -> NDArray[np.float64]:
    if tensor.kind != "F32" or len(tensor.shape) != 1:
        raise NotUnderstood(f"has {tensor.name} of type {tensor.kind} and shape {tensor.shape}")
    path = metadata.header.files[tensor.part]
    found = np.fromfile(path, dtype="<f4", count=tensor.shape[0], offset=tensor.offset)
    if not (np.isfinite(found).all() and (found > 0).all()):
        raise NotUnderstood(f"has numbers in {tensor.name} that are not factors")
    return found.astype(np.float64)

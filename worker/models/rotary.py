"""Rotary angles of stated families: the frequencies of each kind, with the operations of transformers in their order,
so that they have the same bits.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.worker.executors.layout import Rotary


def make_rotary(rope: Mapping[str, Any], head_dim: int, max_positions: int, *, interleaved: bool = False) -> Rotary:
    """The angles of a config's complete `rope_parameters`, for heads of `head_dim` dimensions in a model of
    `max_positions`.
    """
    turning = 1.0 if rope["rope_type"] == "proportional" else rope.get("partial_rotary_factor", 1.0)
    num_dims = int(head_dim * turning)
    given = {**rope, "max_position_embeddings": max_positions}
    frequencies, scaling = _KINDS[rope["rope_type"]](given, num_dims)
    return Rotary(inverse_frequencies=frequencies, scaling=scaling, interleaved=interleaved)


def _default(rope: Mapping[str, Any], dim: int) -> tuple[Tensor, float]:
    return 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)), 1.0


def _proportional(rope: Mapping[str, Any], dim: int) -> tuple[Tensor, float]:
    """Pairs are of the whole head, and those beyond a share of it do not turn."""
    turning = int(rope.get("partial_rotary_factor", 1.0) * dim // 2)
    powers = torch.arange(0, 2 * turning, 2, dtype=torch.int64).to(dtype=torch.float) / dim
    frequencies = torch.cat((1.0 / (rope["rope_theta"] ** powers), torch.zeros(dim // 2 - turning)))
    return frequencies / rope.get("factor", 1.0), 1.0


def _linear(rope: Mapping[str, Any], dim: int) -> tuple[Tensor, float]:
    frequencies, scaling = _default(rope, dim)
    return frequencies / rope["factor"], scaling


def _dynamic(rope: Mapping[str, Any], dim: int) -> tuple[Tensor, float]:
    """Up to the model's length."""
    factor, length = rope["factor"], rope["max_position_embeddings"]
    base = rope["rope_theta"] * ((factor * length / length) - (factor - 1)) ** (dim / (dim - 2))
    return _default({"rope_theta": base}, dim)


def _ntk_alpha(rope: Mapping[str, Any], dim: int) -> tuple[Tensor, float]:
    return _default({"rope_theta": rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))}, dim)


def _longrope(rope: Mapping[str, Any], dim: int) -> tuple[Tensor, float]:
    """Up to the original length."""
    length = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or rope["max_position_embeddings"] / length
    scaling = rope.get("attention_factor")
    if scaling is None:
        scaling = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(length))
    powers = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / (torch.tensor(rope["short_factor"]) * rope["rope_theta"] ** powers), float(scaling)


def _llama3(rope: Mapping[str, Any], dim: int) -> tuple[Tensor, float]:
    """Low frequencies are divided by the factor, high ones stay, those between are blended."""
    frequencies, scaling = _default(rope, dim)
    factor, low, high = (rope[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    length = rope["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > length / low, frequencies / factor, frequencies)
    smooth = (length / wavelengths - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    is_between = ~(wavelengths < length / high) * ~(wavelengths > length / low)
    return torch.where(is_between, blended, scaled), scaling


def _yarn(rope: Mapping[str, Any], dim: int) -> tuple[Tensor, float]:
    factor = rope["factor"]
    powers = rope["rope_theta"] ** (torch.arange(0, dim, 2).to(dtype=torch.float) / dim)
    first, last = _yarn_range(rope, dim)
    if first == last:
        last += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first), 0, 1)
    kept = 1 - ramp
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, _yarn_scaling(rope)


def _yarn_range(rope: Mapping[str, Any], dim: int) -> tuple[float, float]:
    """The dimensions between which frequencies go over from kept to divided."""
    base, length = rope["rope_theta"], rope["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return (dim * math.log(length / (turns * 2 * math.pi))) / (2 * math.log(base))

    first, last = dimension(rope.get("beta_fast", 32)), dimension(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    return max(first, 0), min(last, dim - 1)


def _yarn_scaling(rope: Mapping[str, Any]) -> float:
    factor = rope["factor"]

    def scale(weight: float = 1) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if "mscale" in rope and "mscale_all_dim" in rope:
        return float(scale(rope["mscale"]) / scale(rope["mscale_all_dim"]))
    return scale()


_KINDS: Final[Mapping[str, Callable[[Mapping[str, Any], int], tuple[Tensor, float]]]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "ntk_alpha": _ntk_alpha,
    "longrope": _longrope,
    "llama3": _llama3,
    "yarn": _yarn,
}

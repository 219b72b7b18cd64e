"""Tensors of a quantized module in its file, by the last parts of their names, and how many weights are in them."""

import math
from collections.abc import Sequence
from typing import Final

from holdfast.worker.models.quantization.scheme import QuantizationScheme

_CODES: Final = {"weight_packed": "I32", "qweight": "I32"}
_BESIDE: Final = (
    *("qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape"),
    "weight_g_idx",
)
"""Last parts of the names of tensors that belong to codes."""

UNUSED: Final = frozenset(
    {"input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"}
    | {"activation_scale", "q_scale", "k_scale", "v_scale", "inv_freq"}
)
"""Tensors of activations and of the KV cache, which stay in the type that is served; and angles that are computed."""


def num_weights(scheme: QuantizationScheme, name: str, dtype: str, shape: Sequence[int]) -> int:
    """Number of weights in the tensor of this name, type (as a header names it) and shape."""
    module, _, kind = name.rpartition(".")
    count = math.prod(shape)
    if kind in _BESIDE or kind in UNUSED or kind.endswith("_scales"):
        return 0
    if kind.endswith("_blocks"):
        return 2 * count
    if _CODES.get(kind) == dtype:
        found = scheme.of(module)
        return count * (32 // found.bits) if found else count
    return count

"""Formats of quantized weights: the tensors of a module's weight, and their meaning. One function for each."""

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import torch
from torch import Tensor

from holdfast.worker.models.formats.codes import (
    AWQ_ORDER,
    Codes,
    Float4Codes,
    PackedCodes,
    PlainCodes,
    unpacked,
)
from holdfast.worker.models.formats.quantization_scheme import Layout, WeightScheme
from holdfast.worker.models.formats.quantized_weight import QuantizedWeight, TransposedExperts

_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
_FEW: Final = 1024
"""Scales of a weight that are looked at before all of them are."""

_INT32: Final = (torch.int32,)
_EIGHT_BITS: Final = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


class Parts(Protocol):
    """The tensors of one module, by the last parts of their names."""

    def has(self, part: str) -> bool:
        """Whether there is such a tensor."""
        ...

    def take(self, part: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        """The tensor, of one of these types and shapes. Raises `ConfigurationError` that names tensor and file."""
        ...

    def refuse(self, part: str, reason: str) -> Exception:
        """The error for a fault of this tensor."""
        ...


def read_weight(parts: Parts, scheme: WeightScheme, shape: tuple[int, ...]) -> QuantizedWeight | TransposedExperts:
    """The weight of a module, of this shape. Raises `ConfigurationError` that names tensor and file."""
    return _FORMATS[scheme.layout](parts, scheme, shape)


def _ceil(length: int, step: int) -> int:
    return -(-length // step)


def _grid(scheme: WeightScheme, shape: tuple[int, ...]) -> tuple[int, int]:
    """Blocks of outputs and groups of inputs that have a scale each."""
    rows, columns = scheme.block
    return _ceil(shape[0], rows or shape[0]), _ceil(shape[1], columns or shape[1])


def _check_groups(parts: Parts, part: str, scheme: WeightScheme, shape: tuple[int, ...]) -> None:
    """Formats without blocks and without an order of activations have whole groups alone. With another length, groups
    of as many would be read wrongly.
    """
    rows, columns = scheme.block
    if rows == 1 and columns is not None and shape[1] % columns:
        raise parts.refuse(part, f"belongs to {shape[1]} inputs, which groups of {columns} do not divide")


def _scales(parts: Parts, part: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
    """A weight's scales. All of them zero are what a file has where it was never written."""
    scales = parts.take(part, dtypes, *shapes)
    is_set = any(bool(some.float().any()) for some in (scales.flatten()[:_FEW], scales))  # few answer for most files
    if scales.numel() and not is_set:
        raise parts.refuse(part, "is zero everywhere")
    return scales


def _weight(
    scheme: WeightScheme,
    shape: tuple[int, ...],
    codes: Codes,
    scales: Tensor,
    zeros: Tensor | None = None,
    groups: Tensor | None = None,
) -> QuantizedWeight:
    rows, columns = scheme.block
    if groups is None:
        groups = torch.arange(shape[1]) // (columns or shape[1])
    return QuantizedWeight(
        rows=(0, shape[0]),
        columns=(0, shape[1]),
        codes=codes,
        scales=scales,
        zeros=zeros,
        block_rows=rows or shape[0],
        groups=groups,
    )


def _groups_of(parts: Parts, part: str, num_inputs: int, num_groups: int) -> Tensor | None:
    """The group of each input where they are not in order; None where nothing says so."""
    if not parts.has(part):
        return None
    groups = parts.take(part, (torch.int32, torch.int64), (num_inputs,)).long()
    if bool((groups == -1).all()):  # as it was before there were groups
        return None
    lowest, highest = int(groups.min()), int(groups.max())
    if lowest < 0 or highest >= num_groups:
        raise parts.refuse(part, f"names groups {lowest} to {highest}, of {num_groups}")
    return groups


def _gptq(parts: Parts, scheme: WeightScheme, shape: tuple[int, ...]) -> QuantizedWeight:
    outputs, inputs = shape
    bits, per_word = scheme.bits, 32 // scheme.bits
    _, num_groups = _grid(scheme, shape)
    words = parts.take("qweight", _INT32, (_ceil(inputs, per_word), outputs))
    scales = _scales(parts, "scales", _FLOATS, (num_groups, outputs))
    packed = parts.take("qzeros", _INT32, (num_groups, _ceil(outputs, per_word)))
    zeros = unpacked(packed, bits, 1, ((0, num_groups), (0, outputs))).float()
    is_second_version = scheme.is_symmetric and bool((zeros == 1 << (bits - 1)).all())  # whatever the config says
    adds = int(scheme.zeros_are_less_one and not is_second_version)
    codes = PackedCodes(stored=words, bits=bits, packed_dim=0, is_transposed=True)
    groups = _groups_of(parts, "g_idx", inputs, num_groups)
    return _weight(scheme, shape, codes, scales.T, (zeros + adds).T, groups)


def _awq(parts: Parts, scheme: WeightScheme, shape: tuple[int, ...]) -> QuantizedWeight:
    outputs, inputs = shape
    _, num_groups = _grid(scheme, shape)
    _check_groups(parts, "scales", scheme, shape)
    packed_outputs = _ceil(outputs, 32 // scheme.bits)
    words = parts.take("qweight", _INT32, (inputs, packed_outputs))
    scales = _scales(parts, "scales", _FLOATS, (num_groups, outputs))
    packed = parts.take("qzeros", _INT32, (num_groups, packed_outputs))
    zeros = unpacked(packed, scheme.bits, 1, ((0, num_groups), (0, outputs)), AWQ_ORDER)
    codes = PackedCodes(stored=words, bits=scheme.bits, packed_dim=1, is_transposed=True, order=AWQ_ORDER)
    return _weight(scheme, shape, codes, scales.T, zeros.T.float())


def _packed(parts: Parts, scheme: WeightScheme, shape: tuple[int, ...]) -> QuantizedWeight:
    outputs, inputs = shape
    per_word, grid = 32 // scheme.bits, _grid(scheme, shape)
    words = parts.take("weight_packed", _INT32, (outputs, _ceil(inputs, per_word)))
    if parts.has("weight_shape"):
        stated = tuple(parts.take("weight_shape", (torch.int64, torch.int32), (2,)).tolist())
        if stated != shape:
            raise parts.refuse("weight_shape", f"says {list(stated)}, where the model has {list(shape)}")
    scales = _scales(parts, "weight_scale", _FLOATS, *_shapes_of(grid)).reshape(grid)
    _check_groups(parts, "weight_scale", scheme, shape)
    codes = PackedCodes(stored=words, bits=scheme.bits, packed_dim=1, middle=1 << (scheme.bits - 1))
    groups = _groups_of(parts, "weight_g_idx", inputs, grid[1])
    return _weight(scheme, shape, codes, scales, _signed_zeros(parts, scheme, shape), groups)


def _signed_zeros(parts: Parts, scheme: WeightScheme, shape: tuple[int, ...]) -> Tensor | None:
    """compressed-tensors' zero points: int8, or packed along the outputs as codes are."""
    if scheme.is_symmetric and not parts.has("weight_zero_point"):
        return None
    grid, per_word = _grid(scheme, shape), 32 // scheme.bits
    packed_shape = (_ceil(grid[0], per_word), grid[1])
    dtypes = (torch.int32, torch.int8)
    stored = parts.take("weight_zero_point", dtypes, *_shapes_of(grid), packed_shape)
    if stored.dtype == torch.int8 or stored.shape != packed_shape or scheme.layout is not Layout.PACKED:
        return stored.reshape(grid).float()
    return unpacked(stored, scheme.bits, 0, ((0, grid[0]), (0, grid[1]))).float() - (1 << (scheme.bits - 1))


def _shapes_of(grid: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Shapes that scales are stored in: the grid, or less where it is one number or one column."""
    if grid == (1, 1):
        return (), (1,), (1, 1)
    return (grid, (grid[0],)) if grid[1] == 1 else (grid,)


def _plain(parts: Parts, scheme: WeightScheme, shape: tuple[int, ...]) -> QuantizedWeight:
    grid = _grid(scheme, shape)
    values = parts.take("weight", _EIGHT_BITS, (shape[0], shape[1]))
    part = "weight_scale_inv" if parts.has("weight_scale_inv") else "weight_scale"
    _check_groups(parts, part, scheme, shape)
    scales = _scales(parts, part, (*_FLOATS, torch.float8_e8m0fnu), *_shapes_of(grid)).reshape(grid)
    zeros = _signed_zeros(parts, scheme, shape)
    scales = scales if scales.dtype in _FLOATS else scales.float()
    return _weight(scheme, shape, PlainCodes(values), scales, zeros)


def _mxfp4(parts: Parts, scheme: WeightScheme, shape: tuple[int, ...]) -> TransposedExperts:
    experts, inputs, outputs = shape
    groups = _ceil(inputs, 32)
    blocks = parts.take("_blocks", (torch.uint8,), (experts, outputs, groups, 16))
    exponents = parts.take("_scales", (torch.uint8,), (experts, outputs, groups))
    scales = exponents.reshape(-1, groups).view(torch.float8_e8m0fnu).float()
    codes = Float4Codes(blocks.reshape(experts * outputs, -1))
    weight = _weight(scheme, (experts * outputs, inputs), codes, scales)
    return TransposedExperts(weight, (experts, inputs, outputs))


_FORMATS: Final[
    Mapping[Layout, Callable[[Parts, WeightScheme, tuple[int, ...]], QuantizedWeight | TransposedExperts]]
] = {
    Layout.AWQ: _awq,
    Layout.GPTQ: _gptq,
    Layout.MXFP4: _mxfp4,
    Layout.PACKED: _packed,
    Layout.PLAIN: _plain,
}

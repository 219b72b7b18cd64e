"""Weights of a GGUF model: each tensor is a view of the mapped file, dequantized when it is asked for.

A number is what its block says in float32, rounded once to the type that is served. So a model has the bits of the
folder that it would be, dequantized to that type. The formulas of the block types are those of ggml's reference code,
with the roundings of the `gguf` package: each operation by itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.executors.coded import UNIT, UNITS_TOGETHER, CodedRows, CodeForm, CodeKind, Offset, UnitForm, Units
from holdfast.worker.executors.stored_matrix import StoredMatrix
from holdfast.worker.models.formats.gguf_block_names import BLOCKS

_HALF: Final = 16
"""Codes of a block of 32 that are the low bits of their bytes; the high bits are the next 16."""


def dequantized(kind: str, blocks: Tensor) -> Tensor:
    """Blocks of a type [n, bytes of a block], uint8 -> their numbers [n, numbers of a block], float32."""
    return _FORMULAS[kind](blocks)


def _scale(blocks: Tensor, first: int) -> Tensor:
    """The float16 at a byte of each block [n, 1]."""
    return blocks[:, first : first + 2].view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[n, m, bytes] -> [n, m, 2 bytes]: first the low halves of all bytes, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _codes(blocks: Tensor, first: int) -> Tensor:
    """Codes of four bits of a block of 32."""
    return _nibbles(blocks[:, first : first + _HALF])


def _fifth_bits(blocks: Tensor, first: int) -> Tensor:
    """The fifth bits of a block of 32 codes, in their place: bit i of four bytes belongs to code i."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (blocks[:, first : first + 4, None] >> shifts) & 1
    return bits.flatten(1) << 4


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_scale(blocks, 0))


def _q4_0(blocks: Tensor) -> Tensor:
    return _codes(blocks, 2).float().sub_(8).mul_(_scale(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _codes(blocks, 4).float().mul_(_scale(blocks, 0)).add_(_scale(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _codes(blocks, 6) | _fifth_bits(blocks, 2)
    return codes.float().sub_(16).mul_(_scale(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _codes(blocks, 8) | _fifth_bits(blocks, 4)
    return codes.float().mul_(_scale(blocks, 0)).add_(_scale(blocks, 2))


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [n, 8], uint8, of eight groups of 32, out of 12 bytes: of the first four groups the low six
    bits of the first eight bytes; of the others four bits in the last four bytes, and the two left over in the first
    eight.
    """
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((a & 63, (c & 15) | ((a >> 6) << 4)), 1)
    minima = torch.cat((b & 63, (c >> 4) | ((b >> 6) << 4)), 1)
    return scales, minima


def _of_groups(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [n, 8, 1] of blocks that begin with those of all, and six bits of each for each group."""
    scales, minima = (part.float()[..., None] for part in _six_bits(blocks[:, 4:16]))
    return scales * _scale(blocks, 0)[..., None], minima * _scale(blocks, 2)[..., None]


def _codes_of_q4_k(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)


def _codes_of_q5_k(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]  # bit g of byte i belongs to code i of group g
    return codes | (((blocks[:, 16:48, None].mT >> shifts) & 1) << 4)


def _codes_of_q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 8, 32)
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).view(-1, 8, 32)
    return low | (high << 4)


def _scales_of_q6_k(blocks: Tensor) -> Tensor:
    return blocks[:, 192:208].contiguous().view(torch.int8).float() * _scale(blocks, 208)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _of_groups(blocks)
    return _codes_of_q4_k(blocks).float().mul_(scales).sub_(minima).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _of_groups(blocks)
    return _codes_of_q5_k(blocks).float().mul_(scales).sub_(minima).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    codes = _codes_of_q6_k(blocks).float().sub_(32).view(-1, 16, 16)
    return codes.mul_(_scales_of_q6_k(blocks)[..., None]).flatten(1)


_E2M1: Final = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""Numbers of codes of four bits: a sign, two bits of exponent, one of mantissa; ggml knows no negative zero."""


def _mxfp4(blocks: Tensor) -> Tensor:
    """The first byte is the scale's exponent, more by 127."""
    scales = torch.exp2(blocks[:, :1].float() - 127)
    return _E2M1[_codes(blocks, 1).long()] * scales


def coded_of(kind: str, blocks: Tensor) -> CodedRows:
    """Blocks of a type of `K_FORMS` [n, bytes] as codes [n, 256], and scales and minima of their groups [n, groups]."""
    if kind == "Q6_K":
        codes = _codes_of_q6_k(blocks) + (128 - 32)
        return CodedRows(codes=codes.flatten(1), scales=_scales_of_q6_k(blocks), offsets=None)
    scales, minima = _of_groups(blocks)
    codes = _codes_of_q4_k(blocks) if kind == "Q4_K" else _codes_of_q5_k(blocks)
    return CodedRows(codes=codes.flatten(1), scales=scales[..., 0], offsets=-minima[..., 0])


K_FORMS: Final = {
    "Q4_K": (CodeForm(kind=CodeKind.FOUR_BITS, offset=Offset.MINIMA, scales=torch.float32), 32),
    "Q5_K": (CodeForm(kind=CodeKind.EIGHT_BITS, offset=Offset.MINIMA, scales=torch.float32), 32),
    "Q6_K": (CodeForm(kind=CodeKind.EIGHT_BITS, offset=Offset.MIDDLE, scales=torch.float32), 16),
}
"""Types whose groups are smaller than their blocks: how their codes lie, and the numbers of a group."""


def units_of(kind: str, blocks: Tensor) -> Units:
    """Blocks of a type of `UNIT_FORMS` [n, bytes of a block], uint8, as units: each a row."""
    form, codes = UNIT_FORMS[kind], _UNIT_CODES[kind](blocks)
    if form.offset is Offset.BYTE_MINIMA:
        of_units = _six_bits(blocks[:, 4:16])
        return Units(codes=codes, scales=of_units[0], offsets=of_units[1], factors=_halves(blocks, 0, 4)[:, None])
    if form.offset is Offset.BYTE_HALVES:
        scales, factors = blocks[:, 192:208].view(torch.int8), _halves(blocks, 208, 210)[:, None]
        first, second = scales[:, ::2].contiguous(), scales[:, 1::2].contiguous()
        return Units(codes=codes, scales=first, offsets=second, factors=factors)
    minima = _halves(blocks, 2, 4) if form.offset is Offset.MINIMA else None
    return Units(codes=codes, scales=_halves(blocks, 0, 2), offsets=minima)


def _halves(blocks: Tensor, first: int, last: int) -> Tensor:
    """The float16 in some bytes of each block."""
    return blocks[:, first:last].contiguous().view(torch.float16)


UNIT_FORMS: Final = {
    "Q8_0": UnitForm(bits=8, offset=Offset.MIDDLE, scales=torch.float16),
    "Q4_0": UnitForm(bits=4, offset=Offset.MIDDLE, scales=torch.float16),
    "Q4_1": UnitForm(bits=4, offset=Offset.MINIMA, scales=torch.float16),
    "Q5_0": UnitForm(bits=5, offset=Offset.MIDDLE, scales=torch.float16),
    "Q5_1": UnitForm(bits=5, offset=Offset.MINIMA, scales=torch.float16),
    "Q4_K": UnitForm(bits=4, offset=Offset.BYTE_MINIMA, scales=torch.float16),
    "Q5_K": UnitForm(bits=5, offset=Offset.BYTE_MINIMA, scales=torch.float16),
    "Q6_K": UnitForm(bits=6, offset=Offset.BYTE_HALVES, scales=torch.float16),
}
"""Types whose blocks are a unit, or eight."""

_UNIT_CODES: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "Q8_0": lambda blocks: blocks[:, 2:] ^ 128,
    "Q4_0": lambda blocks: _codes(blocks, 2),
    "Q4_1": lambda blocks: _codes(blocks, 4),
    "Q5_0": lambda blocks: _codes(blocks, 6) | _fifth_bits(blocks, 2),
    "Q5_1": lambda blocks: _codes(blocks, 8) | _fifth_bits(blocks, 4),
    "Q4_K": lambda blocks: _codes_of_q4_k(blocks).flatten(1),
    "Q5_K": lambda blocks: _codes_of_q5_k(blocks).flatten(1),
    "Q6_K": lambda blocks: _codes_of_q6_k(blocks).flatten(1),
}

_FORMULAS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}


_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufWeight(StoredMatrix):
    """A matrix, or a range of its rows and columns, as it lies in a file; a vector is a matrix of one column."""

    kind: str
    stored: Tensor
    """[rows of the tensor, bytes of a row], uint8, mapped."""
    order: Tensor | None
    """[rows of the tensor], int64: which stored row each one is. None: the same."""
    column_order: Tensor | None = None
    """[columns of the tensor], int64, where blocks are torn apart: codes become numbers then."""
    block_order: Tensor | None = None
    """[blocks of a row], int64: which stored block each one is. None: the same."""
    plus: float
    """Is added to each number, in float32."""
    is_vector: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.num_rows_columns[:1] if self.is_vector else self.num_rows_columns

    def to(self, dtype: torch.dtype) -> Tensor:
        numbers = StoredMatrix.to(self, dtype)  # slots make a new class, which super() does not know
        return numbers[:, 0] if self.is_vector else numbers

    @property
    def mapped(self) -> Tensor:
        return self.stored

    @property
    def unit_form(self) -> UnitForm | None:
        is_cut_within = any(column % UNIT for column in self.columns)
        is_changed = self.plus or self.is_vector or self.column_order is not None
        form = None if is_cut_within or is_changed else UNIT_FORMS.get(self.kind)
        if form is None or not form.offset.num_factors:
            return form
        return replace(form, before=self.columns[0] // UNIT % UNITS_TOGETHER)

    def units(self, first: int, last: int) -> Units:
        values, num_bytes = BLOCKS[self.kind]
        start, end = self.columns
        block, blocks_end = start // values, -(-end // values)
        blocks = self._stored(first, last)[:, block * num_bytes : blocks_end * num_bytes].reshape(-1, num_bytes)
        found = units_of(self.kind, blocks)
        units = slice((start - block * values) // UNIT, (end - block * values) // UNIT)
        return Units(
            codes=found.codes.view(last - first, -1)[:, units.start * UNIT : units.stop * UNIT],
            scales=found.scales.reshape(last - first, -1)[:, units],
            offsets=None if found.offsets is None else found.offsets.reshape(last - first, -1)[:, units],
            factors=None if found.factors is None else found.factors.view(last - first, -1, found.factors.shape[-1]),
        )

    @property
    def code_form(self) -> CodeForm | None:
        is_changed = self.plus or self.is_vector or self.column_order is not None
        if self.kind in K_FORMS and not (is_changed or self._is_cut_within):
            return K_FORMS[self.kind][0]
        form = self.unit_form
        if form is None:
            return None
        kind = CodeKind.FOUR_BITS if form.bits == 4 else CodeKind.EIGHT_BITS
        return CodeForm(kind=kind, offset=form.offset, scales=form.scales)

    @property
    def input_groups(self) -> Tensor:
        size = K_FORMS[self.kind][1] if self.kind in K_FORMS else UNIT
        return torch.arange(self.columns[1] - self.columns[0]) // size

    @property
    def _is_cut_within(self) -> bool:
        """Whether the range's columns begin or end within a group."""
        return any(column % K_FORMS[self.kind][1] for column in self.columns)

    def _coded_in_blocks(self, first: int, last: int) -> CodedRows:
        values, num_bytes = BLOCKS[self.kind]
        start, end = self.columns
        block, past = start // values, -(-end // values)
        blocks = self._stored(first, last)[:, block * num_bytes : past * num_bytes].reshape(-1, num_bytes)
        found, shape, size = coded_of(self.kind, blocks), (last - first, -1), K_FORMS[self.kind][1]
        own = slice(start - block * values, end - block * values)
        groups = slice(own.start // size, own.stop // size)
        return CodedRows(
            codes=found.codes.view(shape)[:, own],
            scales=found.scales.view(shape)[:, groups],
            offsets=None if found.offsets is None else found.offsets.view(shape)[:, groups],
        )

    def coded(self, first: int, last: int) -> CodedRows:
        if self.kind in K_FORMS:
            return self._coded_in_blocks(first, last)
        units, form = self.units(first, last), self.unit_form
        is_of_five = form is not None and form.bits == 5 and form.offset is Offset.MIDDLE
        codes = units.codes + (128 - 16) if is_of_five else units.codes
        return CodedRows(codes=codes, scales=units.scales, offsets=units.offsets)

    def _stored(self, first: int, last: int) -> Tensor:
        rows = self.stored[first:last] if self.order is None else self.stored[self.order[first:last]]
        if self.block_order is None:
            return rows
        return rows.reshape(len(rows), len(self.block_order), -1)[:, self.block_order].flatten(1)

    def numbers(self, first: int, last: int) -> Tensor:
        if self.column_order is None:
            numbers = self._numbers(self._stored(first, last), self.columns)
        else:
            whole = self._numbers(self._stored(first, last), (0, len(self.column_order)))
            numbers = whole[:, self.column_order[slice(*self.columns)]]
        return numbers + self.plus if self.plus else numbers

    def _numbers(self, stored: Tensor, columns: tuple[int, int]) -> Tensor:
        """Numbers of some stored rows, for a range of the stored columns."""
        first, last = columns
        if self.kind in _FLOATS:
            return stored.view(_FLOATS[self.kind])[:, first:last].float()
        values, num_bytes = BLOCKS[self.kind]
        block, end = first // values, -(-last // values)
        blocks = stored[:, block * num_bytes : end * num_bytes].reshape(-1, num_bytes)
        numbers = dequantized(self.kind, blocks).view(len(stored), -1)
        return numbers[:, first - block * values : last - block * values]

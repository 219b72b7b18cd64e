"""Codes of quantized weights: how they are packed into words, and what number each stands for before it is scaled."""

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from holdfast.worker.executors.coded import CodeKind

IN_ORDER: Final = tuple(range(8))
AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Order in which four bits of a word each of eight neighbours lies."""

_FLOATING: Final = {torch.float8_e4m3fn: CodeKind.E4M3, torch.float8_e5m2: CodeKind.E5M2}
_E4M3_BITS: Final = 0xBF80 - 0x10000
"""Bits of a float16 that those of E4M3 fill, as a signed number."""
_E4M3_FACTOR: Final = 256.0
"""Ratio of a number to the float16 of its bits, since their exponents begin elsewhere."""

_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of FP4 (OCP Microscaling Formats 1.0)


class Codes(Protocol):
    """The codes of a weight [out, in]."""

    @property
    def stored(self) -> Tensor:
        """Codes in the form of a file."""
        ...

    def read(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """[rows, columns], float32: those of a range, by the first one and the one past the last."""
        ...

    @property
    def unsigned(self) -> "UnsignedCodes | None":
        """The same as unsigned codes; None where they are no whole numbers."""
        ...

    @property
    def floating(self) -> "FloatingCodes | None":
        """The same as floating-point codes of eight bits; None where they are others."""
        ...


class UnsignedCodes(Protocol):
    """Codes of 4 or 8 bits."""

    @property
    def bits(self) -> int:
        """Bits per code: 4 or 8."""
        ...

    @property
    def middle(self) -> int:
        """Is taken from each unsigned code."""
        ...

    def read_unsigned(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """Like `Codes.read`, as uint8 with nothing subtracted."""
        ...

    @property
    def lie_in_units(self) -> bool:
        """Whether they are stored in a form of `Units.codes`."""
        ...

    def of_units(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """The same in a form of `Units.codes`, a view where they lie so; columns in whole units."""
        ...


@dataclass(frozen=True, slots=True)
class FloatingCodes:
    """Floating-point numbers of eight bits [out, in]."""

    kind: CodeKind
    stored: Tensor
    """Their bits, uint8."""

    def read_bits(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """Like `Codes.read`, as uint8."""
        return self.stored[slice(*rows), slice(*columns)]


@dataclass(frozen=True, slots=True)
class PlainCodes:
    """Numbers of eight bits [out, in], int8 or fp8."""

    stored: Tensor

    def read(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """See `Codes`."""
        own = self.stored[slice(*rows), slice(*columns)]
        return own.float() if own.dtype == torch.int8 else _numbers_of_floats(own)

    @property
    def unsigned(self) -> "UnsignedCodes | None":
        """See `Codes`."""
        return _SignedBytes(self.stored) if self.stored.dtype == torch.int8 else None

    @property
    def floating(self) -> "FloatingCodes | None":
        """See `Codes`."""
        kind = _FLOATING.get(self.stored.dtype)
        return None if kind is None else FloatingCodes(kind, self.stored.view(torch.uint8))


def _numbers_of_floats(codes: Tensor) -> Tensor:
    """Floating-point codes of eight bits as float32, through the float16 that has their bits: torch's own conversion
    takes several times as long.
    """
    bits = codes.view(torch.int8)
    words = bits.to(torch.int16)
    if codes.dtype == torch.float8_e5m2:
        return (words << 8).view(torch.float16).float()
    numbers = ((words << 7) & _E4M3_BITS).view(torch.float16).float().mul_(_E4M3_FACTOR)
    is_nan = (bits & 127) == 127
    return numbers.masked_fill_(is_nan, torch.nan) if bool(is_nan.any()) else numbers


@dataclass(frozen=True, slots=True)
class _SignedBytes:
    """Whole numbers of eight bits [out, in], int8, as `UnsignedCodes`."""

    stored: Tensor
    bits: int = 8
    middle: int = 128
    lie_in_units: bool = True

    def read_unsigned(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """See `UnsignedCodes`."""
        return self.stored[slice(*rows), slice(*columns)].view(torch.uint8) ^ 128

    def of_units(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """See `UnsignedCodes`."""
        return self.stored[slice(*rows), slice(*columns)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCodes:
    """Unsigned codes in words of 32 bits, the first in the lowest bits."""

    stored: Tensor
    """[out, in] or, `is_transposed`, [in, out], but for the dimension that is packed; int32."""
    bits: int
    packed_dim: int
    is_transposed: bool = False
    order: tuple[int, ...] = IN_ORDER
    """Position in a word of each of the neighbours."""
    middle: int = 0
    """Is taken from each code."""

    def read(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """See `Codes`."""
        codes = self._unpacked(rows, columns).float()
        return codes.sub_(self.middle) if self.middle else codes

    @property
    def unsigned(self) -> "UnsignedCodes | None":
        """See `Codes`."""
        return self

    @property
    def floating(self) -> "FloatingCodes | None":
        """See `Codes`."""
        return None

    def read_unsigned(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """See `UnsignedCodes`."""
        return self._unpacked(rows, columns)

    @property
    def lie_in_units(self) -> bool:
        """See `UnsignedCodes`."""
        is_in_rows = not self.is_transposed and self.packed_dim == 1
        return is_in_rows and self.order == IN_ORDER and self.stored.stride(1) == 1

    def of_units(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """See `UnsignedCodes`."""
        if not self.lie_in_units:
            return self._unpacked(rows, columns).contiguous()
        first, last = (column * self.bits // 8 for column in columns)
        return self.stored.view(torch.uint8)[slice(*rows), first:last]

    def _unpacked(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        ranges = (columns, rows) if self.is_transposed else (rows, columns)
        codes = unpacked(self.stored, self.bits, self.packed_dim, ranges, self.order)
        return codes.T if self.is_transposed else codes


def unpacked(
    words: Tensor,
    bits: int,
    packed_dim: int,
    ranges: tuple[tuple[int, int], tuple[int, int]],
    order: tuple[int, ...] = IN_ORDER,
) -> Tensor:
    """Codes of a range of both dimensions, uint8, from int32 words [a, b] that are packed along a dimension, of 4 or 8
    bits each.
    """
    per_word = 32 // bits
    (start, stop), (other_start, other_stop) = ranges[packed_dim], ranges[1 - packed_dim]
    first, last = start // per_word, -(-stop // per_word)
    words = words.narrow(packed_dim, first, last - first).narrow(1 - packed_dim, other_start, other_stop - other_start)
    codes = words.contiguous().view(torch.uint8)
    if bits == 4:
        pairs = codes.to(torch.int16)
        codes = ((pairs | (pairs << 4)) & 0x0F0F).view(torch.uint8)  # a byte's lower half, then its upper one
    codes = codes.view(*words.shape, per_word)
    if order[:per_word] != IN_ORDER[:per_word]:
        codes = codes[..., order[:per_word]]
    codes = (codes if packed_dim == 1 else codes.transpose(1, 2)).flatten(packed_dim, packed_dim + 1)
    return codes.narrow(packed_dim, start - first * per_word, stop - start)


@dataclass(frozen=True, slots=True)
class Float4Codes:
    """Numbers E2M1 [rows, columns / 2], two in a byte, the first in the low bits, uint8."""

    stored: Tensor

    def read(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """See `Codes`."""
        first, last = columns[0] // 2, -(-columns[1] // 2)
        packed = self.stored[slice(*rows), first:last]
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
        table = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
        return table[codes[:, columns[0] - 2 * first : columns[1] - 2 * first].int()]

    @property
    def unsigned(self) -> "UnsignedCodes | None":
        """See `Codes`."""
        return None

    @property
    def floating(self) -> "FloatingCodes | None":
        """See `Codes`."""
        return None

"""Matrices that lie in a file as codes: a range of rows and columns is dequantized on demand, piece by piece, so that
only the range itself is held in memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.worker.executors.coded import CodedRows, CodeForm, UnitForm, Units
from holdfast.worker.executors.mapped_files import discard_contents

AT_ONCE: Final = 2**18
"""Numbers that are dequantized together: few enough to stay in a core's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesAndScales:
    """Rows of a matrix whose numbers are (code - zero point) * scale in float32, rounded once to the served type."""

    codes: Tensor
    """[rows, columns], of a type of eight bits."""
    ends: NDArray[np.int64]
    """[runs]: the column past the last of each run of columns that share a scale and a zero point."""
    scales: Tensor
    """[rows, runs], float32."""
    zeros: Tensor
    """The same of zero points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix(ABC):
    """A range of the rows and columns of a matrix."""

    rows: tuple[int, int]
    """The first one, and the one past the last."""
    columns: tuple[int, int]
    padding: int = 0
    """Rows of zeros behind those of the range."""

    @property
    @abstractmethod
    def mapped(self) -> Tensor:
        """The view of a file that its codes are read of; or their memory."""

    @property
    def can_be_read_again(self) -> bool:
        """Whether its data can be reread from a file after its memory is returned."""
        return True

    @property
    def made_of(self) -> "StoredMatrix | None":
        """A matrix in a file that its codes were made of, and that names them; None: they lie in the file."""
        return None

    def with_codes(self) -> "StoredMatrix":
        """The same matrix with codes in memory, if they are made whenever some rows are read; else itself."""
        return self

    @abstractmethod
    def numbers(self, first: int, last: int) -> Tensor:
        """Numbers of these rows of the matrix in the range's columns, float32."""

    def bytes_and_scales(self, first: int, last: int) -> BytesAndScales | None:
        """Codes and scales of the numbers of these rows, if each is a code of eight bits with a scale; else None."""
        return None

    @property
    def unit_form(self) -> UnitForm | None:
        """Form of the range's units; None if it has none: its numbers are not codes with a scale, or one unit has
        several scales.
        """
        return None

    @property
    def lies_in_units(self) -> bool:
        """Whether `units` gives codes as they are stored: any number of rows takes no memory for them."""
        return False

    def units(self, first: int, last: int) -> Units:
        """Units of these rows of the matrix in the range's columns. Only if there is a `unit_form`."""
        raise NotImplementedError(f"rows {first} to {last} of a {type(self).__name__} do not lie in units")

    @property
    def code_form(self) -> CodeForm | None:
        """Form of the range's codes; None if its numbers must be dequantized."""
        return None

    @property
    def input_groups(self) -> Tensor:
        """[the range's columns], int64: the group of each, whose scales and offsets `coded` gives. Only where there is
        a `code_form`.
        """
        raise NotImplementedError(f"a {type(self).__name__} has no codes")

    def coded(self, first: int, last: int) -> CodedRows:
        """Codes of these rows of the matrix in the range's columns. Only if there is a `code_form`."""
        raise NotImplementedError(f"rows {first} to {last} of a {type(self).__name__} have no codes")

    @property
    def num_rows_columns(self) -> tuple[int, int]:
        """Rows of the range, padding included, and columns."""
        return self.rows[1] - self.rows[0] + self.padding, self.columns[1] - self.columns[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as a tensor of the model."""
        return self.num_rows_columns

    def __len__(self) -> int:
        return self.num_rows_columns[0]

    def narrow(self, dim: int, start: int, length: int) -> Self:
        """Same as `torch.Tensor.narrow`."""
        assert 0 <= start <= start + length <= self.num_rows_columns[dim], "a share lies within its tensor"
        if dim == 0:
            first, last = (min(self.rows[0] + row, self.rows[1]) for row in (start, start + length))
            return replace(self, rows=(first, last), padding=length - (last - first))
        return replace(self, columns=(self.columns[0] + start, self.columns[0] + start + length))

    def __getitem__(self, rows: slice) -> Self:
        start, stop, _ = rows.indices(len(self))
        return self.narrow(0, start, max(0, stop - start))

    def filled_up(self, num_rows: int) -> Self:
        """The matrix with rows of zeros behind its own, `num_rows` in all."""
        return replace(self, padding=num_rows - (self.rows[1] - self.rows[0]))

    def to(self, dtype: torch.dtype) -> Tensor:
        """Numbers, each rounded once, in separate memory. Pages of the file are given back."""
        out = self.copied(dtype)
        if self.can_be_read_again:
            discard_contents(self.mapped)
        return out

    def copied(self, dtype: torch.dtype) -> Tensor:
        """Numbers [rows, columns], each rounded once, in separate memory."""
        first, last = self.rows
        out = torch.empty(*self.num_rows_columns, dtype=dtype)
        out[last - first :] = 0
        step = max(1, AT_ONCE // max(1, out.shape[1]))

        def write(start: int) -> None:
            end = min(last, start + step)
            out[start - first : end - first] = self.numbers(start, end)

        for_all(write, range(first, last, step))
        return out


def for_all(write: Callable[[int], None], starts: range) -> None:
    """Calls it with each, on torch's number of threads; each call computes on one, since torch's own threads busy-wait
    for each other after every operation.
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that begin from here on take this over
    try:
        if usual == 1 or len(starts) == 1:
            for start in starts:
                write(start)
            return
        with ThreadPoolExecutor(usual) as pool:
            for _ in pool.map(write, starts):
                pass
    finally:
        torch.set_num_threads(usual)

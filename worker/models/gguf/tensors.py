"""Weights of a GGUF model: each tensor is a view of the mapped file, and numbers once it is asked for.

A number is what its block says in float32, rounded once to the type that is served. So a model has the bits of the
folder that it would be, dequantized to that type.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.executors.mapped_files import discard_contents, storage_of_file, tensor_in_file
from holdfast.worker.models.gguf.block_names import BLOCKS
from holdfast.worker.models.gguf.block_types import dequantized
from holdfast.worker.models.gguf.folder import IndexedTensor, read_index

_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_AT_ONCE: Final = 2**18
"""Numbers that are dequantized together: few enough to stay in a core's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufWeight:
    """A matrix, or a range of its rows and columns, as it lies in a file; a vector is a matrix of one column."""

    kind: str
    stored: Tensor
    """[rows of the tensor, bytes of a row], uint8, mapped."""
    order: Tensor | None
    """[rows of the tensor], int64: which stored row each one is. None: the same."""
    rows: tuple[int, int]
    """The first one, and the one past the last."""
    columns: tuple[int, int]
    plus: float
    """Is added to each number, in float32."""
    is_vector: bool

    @property
    def shape(self) -> tuple[int, ...]:
        lengths = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        return lengths[:1] if self.is_vector else lengths

    def __len__(self) -> int:
        return self.shape[0]

    def narrow(self, dim: int, start: int, length: int) -> "GgufWeight":
        """As torch's."""
        assert 0 <= start <= start + length <= self.shape[dim], "a share lies within its tensor"
        if dim == 0:
            return replace(self, rows=(self.rows[0] + start, self.rows[0] + start + length))
        return replace(self, columns=(self.columns[0] + start, self.columns[0] + start + length))

    def __getitem__(self, rows: slice) -> "GgufWeight":
        start, stop, _ = rows.indices(len(self))
        return self.narrow(0, start, max(0, stop - start))

    def to(self, dtype: torch.dtype) -> Tensor:
        """Its numbers, in memory of their own."""
        first, last = self.rows
        out = torch.empty(last - first, self.columns[1] - self.columns[0], dtype=dtype)
        step = max(1, _AT_ONCE // out.shape[1])

        def write(start: int) -> None:
            end = min(last, start + step)
            stored = self.stored[start:end] if self.order is None else self.stored[self.order[start:end]]
            numbers = self._numbers(stored)
            out[start - first : end - first] = numbers + self.plus if self.plus else numbers

        _for_all(write, range(first, last, step))
        discard_contents(self.stored)  # pages of the file, which can be read again
        return out[:, 0] if self.is_vector else out

    def _numbers(self, stored: Tensor) -> Tensor:
        """Of some stored rows, the numbers of the range's columns."""
        first, last = self.columns
        if self.kind in _FLOATS:
            return stored.view(_FLOATS[self.kind])[:, first:last].float()
        values, num_bytes = BLOCKS[self.kind]
        block, end = first // values, -(-last // values)
        blocks = stored[:, block * num_bytes : end * num_bytes].reshape(-1, num_bytes)
        numbers = dequantized(self.kind, blocks).view(len(stored), -1)
        return numbers[:, first - block * values : last - block * values]


def _for_all(write: Callable[[int], None], starts: range) -> None:
    """Calls it with each, on as many threads as torch has; each call computes on one, for torch's own threads wait for
    each other, busily, after every operation.
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


class GgufTensors:
    """The tensors of a folder that was made of a GGUF file. Each is taken once."""

    def __init__(self, folder: Path) -> None:
        self._tensors = {tensor.name: tensor for tensor in read_index(folder)}
        files = {tensor.file for tensor in self._tensors.values()}
        self._storages = {file: storage_of_file(folder / file) for file in files}

    def take(self, name: str) -> GgufWeight | None:
        """None: there is none of this name, or it was taken."""
        tensor = self._tensors.pop(name, None)
        return None if tensor is None else self._weight(tensor)

    @property
    def left(self) -> set[str]:
        """The names of those that were not taken."""
        return set(self._tensors)

    def _weight(self, tensor: IndexedTensor) -> GgufWeight:
        is_vector = len(tensor.shape) == 1
        num_rows, num_columns = (tensor.shape[0], 1) if is_vector else tensor.shape
        row_bytes = tensor.num_bytes // num_rows
        stored = tensor_in_file(
            self._storages[tensor.file], torch.uint8, tensor.offset, (num_rows, row_bytes), (row_bytes, 1)
        )
        return GgufWeight(
            kind=tensor.kind,
            stored=stored,
            order=_halves_first(num_rows, tensor.heads) if tensor.heads else None,
            rows=(0, num_rows),
            columns=(0, num_columns),
            plus=tensor.plus,
            is_vector=is_vector,
        )


def _halves_first(num_rows: int, heads: int) -> Tensor:
    """Of each row of a head in Hugging Face's order, first all first rows of pairs: where it lies pair after pair."""
    return torch.arange(num_rows).view(heads, -1, 2).transpose(1, 2).flatten()

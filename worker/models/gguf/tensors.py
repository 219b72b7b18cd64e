"""Weights of a GGUF model: each tensor is a view of the mapped file, and numbers once it is asked for.

A number is what its block says in float32, rounded once to the type that is served. So a model has the bits of the
folder that it would be, dequantized to that type.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.executors.mapped_files import storage_of_file, tensor_in_file
from holdfast.worker.executors.stored_matrix import StoredMatrix
from holdfast.worker.models.gguf.block_names import BLOCKS
from holdfast.worker.models.gguf.block_types import dequantized
from holdfast.worker.models.gguf.folder import IndexedTensor, read_index

_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufWeight(StoredMatrix):
    """A matrix, or a range of its rows and columns, as it lies in a file; a vector is a matrix of one column."""

    kind: str
    stored: Tensor
    """[rows of the tensor, bytes of a row], uint8, mapped."""
    order: Tensor | None
    """[rows of the tensor], int64: which stored row each one is. None: the same."""
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

    def numbers(self, first: int, last: int) -> Tensor:
        stored = self.stored[first:last] if self.order is None else self.stored[self.order[first:last]]
        numbers = self._numbers(stored)
        return numbers + self.plus if self.plus else numbers

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


class GgufTensors:
    """The tensors of a folder that was made of a GGUF file. Each is taken once."""

    def __init__(self, folder: Path) -> None:
        self._tensors = {tensor.name: tensor for tensor in read_index(folder)}
        files = {tensor.file for tensor in self._tensors.values()}
        self._storages = {file: storage_of_file(folder / file) for file in files}

    def take(self, name: str, shape: tuple[int, ...]) -> GgufWeight | None:
        """None: there is none of this name and shape, or it was taken."""
        tensor = self._tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape:
            return None
        return self._weight(self._tensors.pop(name))

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

"""Tensors of a folder that was made of a GGUF file, by the names of Hugging Face's modules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final, Self, cast

import torch
from torch import Tensor

from holdfast.worker.executors.mapped_files import storage_of_file, tensor_in_file
from holdfast.worker.executors.stored_matrix import StoredMatrix
from holdfast.worker.models.formats.gguf_block_names import Turn, values_of
from holdfast.worker.models.formats.gguf_folder import IndexedTensor, read_index
from holdfast.worker.models.formats.gguf_tensors import GgufWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedWeight(StoredMatrix):
    """Rows of several matrices, one after the other."""

    parts: tuple[GgufWeight, ...]

    @property
    def mapped(self) -> Tensor:
        return self.parts[0].stored

    def narrow(self, dim: int, start: int, length: int) -> Self:
        """Same as `StoredMatrix.narrow`; a range of one part's rows is that part, with its codes."""
        if dim == 0 and not self.padding:
            first = self.rows[0] + start
            for part, before in zip(self.parts, self._starts(), strict=True):
                if before <= first and first + length <= before + len(part):
                    return cast(Self, part.narrow(0, first - before, length))
        return StoredMatrix.narrow(self, dim, start, length)

    def numbers(self, first: int, last: int) -> Tensor:
        found = []
        for part, before in zip(self.parts, self._starts(), strict=True):
            own = max(first, before) - before, min(last, before + len(part)) - before
            if own[0] < own[1]:
                found.append(part.numbers(part.rows[0] + own[0], part.rows[0] + own[1])[:, slice(*self.columns)])
        return torch.cat(found)

    def _starts(self) -> list[int]:
        return [0, *accumulate(len(part) for part in self.parts[:-1])]


def _decays(weight: GgufWeight) -> Tensor:
    """llama.cpp keeps -exp(A_log)."""
    return (-weight.to(torch.float32)).log()


def _absorbed(keys: GgufWeight, values: GgufWeight) -> Tensor:
    """`kv_b_proj` [heads * (plain + value), latent], of what llama.cpp keeps: each head's weight of keys turned,
    [heads * latent, plain], and that of values [heads * value, latent].
    """
    latent = values.shape[1]
    of_keys = keys.to(torch.float32).reshape(-1, latent, keys.shape[1]).mT
    of_values = values.to(torch.float32).reshape(len(of_keys), -1, latent)
    return torch.cat([of_keys, of_values], 1).flatten(0, 1)


FORMS: Final[Mapping[str, Callable[..., Tensor]]] = {
    "decays": _decays,
    "convolution": lambda weight: weight.to(torch.float32).unsqueeze(1),
    "absorbed": _absorbed,
}
"""Tensors of the model that are neither a matrix nor a vector of the file, in float32, by their sources."""


class GgufTensors:
    """The tensors of a folder that was made of a GGUF file. Each is taken once."""

    def __init__(self, folder: Path) -> None:
        self._tensors: dict[str, list[IndexedTensor]] = {}
        for tensor in read_index(folder):
            self._tensors.setdefault(tensor.name, []).append(tensor)
        files = {tensor.file for parts in self._tensors.values() for tensor in parts}
        self._storages = {file: storage_of_file(folder / file) for file in files}

    def take(self, name: str, shape: tuple[int, ...]) -> GgufWeight | StackedWeight | Tensor | None:
        """None: there is no tensor of this name and shape, or it was taken."""
        parts = self._tensors.get(name, [])
        if not parts:
            return None
        if parts[0].form == "matrix" and (sum(one.count for one in parts), *parts[0].shape[1:]) != shape:
            return None
        weights = [self.weight(one) for one in parts]
        found = FORMS[parts[0].form](*weights) if parts[0].form != "matrix" else _stacked(weights)
        if tuple(found.shape) != shape:
            return None
        del self._tensors[name]
        return found

    @property
    def left(self) -> set[str]:
        """Names of unused tensors."""
        return set(self._tensors)

    def weight(self, tensor: IndexedTensor) -> GgufWeight:
        """The numbers of an entry of the index, whatever they are part of."""
        is_vector = len(tensor.stored) == 1
        num_rows, num_columns = (tensor.stored[0], 1) if is_vector else tensor.stored
        row_bytes = tensor.num_bytes // num_rows
        stored = tensor_in_file(
            self._storages[tensor.file], torch.uint8, tensor.offset, (num_rows, row_bytes), (row_bytes, 1)
        )
        size, turn = values_of(tensor.kind), tensor.columns
        whole = turn is not None and turn.moves_whole(size)
        return GgufWeight(
            kind=tensor.kind,
            stored=stored,
            order=_order(num_rows, tensor.rows),
            column_order=None if whole else _order(num_columns, turn),
            block_order=_blocks_of(_order(num_columns, turn), size) if whole else None,
            rows=(tensor.first, tensor.first + tensor.count),
            columns=(0, num_columns),
            plus=tensor.plus,
            is_vector=is_vector,
        )


def _stacked(parts: Sequence[GgufWeight]) -> GgufWeight | StackedWeight:
    if len(parts) == 1:
        return parts[0]
    return StackedWeight(parts=tuple(parts), rows=(0, sum(map(len, parts))), columns=parts[0].columns)


def _blocks_of(order: Tensor | None, size: int) -> Tensor | None:
    """The order of blocks of this many columns; None: that in which they are stored."""
    blocks = None if order is None else order[::size] // size
    return None if blocks is None or torch.equal(blocks, torch.arange(len(blocks))) else blocks


def _order(count: int, turn: Turn | None) -> Tensor | None:
    """Stored place of each of this many rows or columns."""
    if turn is None:
        return None
    start, outer, first, second, inner = turn
    order = torch.arange(count)
    turned = order[start : start + outer * first * second * inner]
    turned.copy_(turned.view(outer, second, first, inner).transpose(1, 2).flatten())
    return order

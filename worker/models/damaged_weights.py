"""Weights with numbers that are NaN or infinite: if one rank finds any in its share, all ranks refuse the model, with
the weight's name in the files.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch import Tensor

from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.executors.finite import NotFiniteError, check_finite
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.models.formats.gguf_folder import is_made_of_gguf, read_index
from holdfast.worker.models.formats.gguf_folder_tensors import GgufTensors
from holdfast.worker.models.safetensors_files import mapped_tensors
from holdfast.worker.models.weights import read_json

Made = TypeVar("Made")

_ROWS: Final = 4096


def made_by_all(make: Callable[[], Made], group: TensorParallelGroup, undo: Callable[[Made], None]) -> Made:
    """Result of `make`; `NotFiniteError` on all ranks if one raises it. The other ranks `undo` their work."""
    made: list[Made] = []
    found = NotFiniteError("a weight of another rank has NaN or infinite numbers")
    try:
        made.append(make())
    except NotFiniteError as error:
        found = NotFiniteError(str(error))  # without the frames, which hold the weights
    if group.all_gather(torch.tensor([len(made)]), dim=0).all():
        return made[0]
    for one in made:
        undo(one)
    raise found


def damaged(folder: Path, found: NotFiniteError) -> UnsupportedModelError:
    """The refusal of a model for the bad weights that a rank has `found`. Reads the folder's files to the weight."""
    model_type = str(read_json(folder / "config.json").get("model_type"))
    for name, file, first, numbers in _of_gguf(folder) if is_made_of_gguf(folder) else _of_safetensors(folder):
        try:
            check_finite(numbers)
        except NotFiniteError:
            row, *others = torch.nonzero(~numbers.float().isfinite())[0].tolist()
            reason = f"its weight {name} has numbers that are NaN or infinite, at {[first + row, *others]} in {file}"
            return UnsupportedModelError(model_type, reason, "Fetch its files again")
    way_out = "Choose another dtype, or fetch its files again"
    return UnsupportedModelError(model_type, f"it overflows, or its files are damaged: {found}", way_out)


def _of_safetensors(folder: Path) -> Iterator[tuple[str, str, int, Tensor]]:
    """Name, file, first row and numbers of each tensor."""
    for name, tensor in mapped_tensors(folder).items():
        yield name, tensor.file, 0, tensor.values.reshape(1) if tensor.values.dim() == 0 else tensor.values


def _of_gguf(folder: Path) -> Iterator[tuple[str, str, int, Tensor]]:
    """The same, in pieces of some rows: they are dequantized."""
    tensors = GgufTensors(folder)
    for entry in read_index(folder):
        weight = tensors.weight(entry)
        for first in range(0, len(weight), _ROWS):
            numbers = weight[first : first + _ROWS].to(torch.float32)
            yield entry.name, str(folder / entry.file), first, numbers

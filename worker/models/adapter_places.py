"""Places of adapters' modules in a rank's layout: which output of which module each output of a linear is.

They are found by reading the layout twice more, from tensors that are numbers of their own rows and columns: so linears
that are stacked, split, taken apart by heads or shared by ranks in any way need no rule of their own here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.distributed.tensor_parallel import TensorParallelGroup
from holdfast.worker.executors.cpu.adapters import AdaptedLinear, IntArray, adaptable
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.models.adapter_folder import AdapterFolder, LowRank
from holdfast.worker.models.families import FAMILIES
from holdfast.worker.models.quantized_activations import Kept
from holdfast.worker.models.rank_share import RankShare
from holdfast.worker.models.stated_layout import LayoutBuilder
from holdfast.worker.models.stated_tensors import StoredTensors

_SUFFIX: Final = ".weight"
_IN_TABLES: Final = 2**40
"""A row's number is its tensor's, times this, and its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One linear of the layout."""

    modules: tuple[str, ...]
    """Hugging Face's modules that its outputs are of."""
    shapes: tuple[tuple[int, int], ...]
    """Outputs and inputs of each module, of the whole model."""
    module_of: IntArray
    """[outputs] the number of an output's module."""
    rows: IntArray
    """[outputs] which output of its module it is."""
    columns: IntArray
    """[inputs] which input of its modules each is."""

    def adapted(self, modules: dict[str, LowRank]) -> AdaptedLinear | None:
        """Numbers that an adapter adds here; None: it has none of these modules."""
        present = [(number, modules[name]) for number, name in enumerate(self.modules) if name in modules]
        if not present:
            return None
        columns = torch.from_numpy(self.columns)
        a = torch.cat([one.a.float()[:, columns] for _, one in present])
        scales = torch.cat([torch.full((len(one.a),), one.scale) for _, one in present])
        b, ranks_of, first = torch.zeros(len(self.rows), len(a)), np.zeros((len(self.rows), 2), dtype=np.int64), 0
        for number, one in present:
            outputs, end = np.flatnonzero(self.module_of == number), first + len(one.a)
            b[torch.from_numpy(outputs), first:end] = one.b.float()[torch.from_numpy(self.rows[outputs])]
            ranks_of[outputs] = first, end
            first = end
        return AdaptedLinear(a=a, b=b, scales=scales, ranks_of=ranks_of)


class AdapterPlaces:
    """The places of one rank's layout."""

    def __init__(self, config: Any, group: TensorParallelGroup) -> None:
        """`config`: as `stated_config.py` has read it."""
        rows, columns = _Numbers(_row_numbers), _Numbers(_column_numbers)
        by_rows, by_columns = (adaptable(_layout(config, numbers, group)) for numbers in (rows, columns))
        self._places = {place: _place(by_rows[place].weights, by_columns[place].weights, rows) for place in by_rows}
        self._shapes = {
            name: shape
            for place in self._places.values()
            if place is not None
            for name, shape in zip(place.modules, place.shapes, strict=True)
        }
        """Shapes [outputs, inputs] of the modules that may have adapters, of the whole model."""

    def apply(self, folder: AdapterFolder) -> dict[str, AdaptedLinear]:
        """This rank's share of an adapter, by linear. Every tensor is applied wherever the model has its module.

        Raises `ConfigurationError` for a module that the model does not have, or whose linear takes no adapter, for one
        of another shape, and for one that the adapter's targets name and that it has no tensors of.
        """
        for name, one in folder.modules.items():
            shape = self._shapes.get(name)
            if shape is None:
                raise folder.refused(
                    f"{name} is no linear of this model that takes an adapter; such are those of attention and of "
                    f"dense MLPs, as {next(iter(self._shapes), 'none')}"
                )
            if (len(one.b), one.a.shape[1]) != shape:
                raise folder.refused(
                    f"{name} has lora_A {tuple(one.a.shape)} and lora_B {tuple(one.b.shape)}, and the model's linear "
                    f"has {shape[1]} inputs and {shape[0]} outputs: it is an adapter of another model"
                )
        self._check_complete(folder)
        found = {key: place.adapted(dict(folder.modules)) for key, place in self._places.items() if place is not None}
        return {key: adapted for key, adapted in found.items() if adapted is not None}

    def _check_complete(self, folder: AdapterFolder) -> None:
        """Layers that it has nothing of may have been left out (`layers_to_transform`); the others are whole."""
        layers = {_layer_of(name) for name in folder.modules}
        if missing := [name for name in folder.misses(self._shapes) if _layer_of(name) in layers]:
            raise folder.refused(f"target_modules name {missing[0]}, and there are no tensors of it")


def _layer_of(module: str) -> str:
    """The part of a module's name up to the number of its layer."""
    parts = module.split(".")
    ends = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: ends[0] + 1]) if ends else module


def _layout(config: Any, numbers: "_Numbers", group: TensorParallelGroup) -> DecoderLayout:
    family = FAMILIES[config.model_type]
    tensors = StoredTensors(numbers, family, None)
    return LayoutBuilder(RankShare(config, family, tensors, group, torch.int64, Kept.NUMBERS)).layout()


class _Numbers:
    """Tensors of any name, whose values say which row, or column, of which tensor they are. Views of one vector."""

    left: Final[set[str]] = set()

    def __init__(self, make: Callable[[int, tuple[int, int]], Tensor]) -> None:
        self._make = make
        self.names: list[str] = []
        self.shapes: list[tuple[int, int]] = []

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) != 2 or not name.endswith(_SUFFIX):
            return torch.zeros((), dtype=torch.int64).expand(shape)
        if ".layers." not in name and ".h." not in name:  # tables of the vocabulary
            return torch.empty(shape, dtype=torch.int64, device="meta")
        self.names.append(name.removesuffix(_SUFFIX))
        self.shapes.append((shape[0], shape[1]))
        return self._make(len(self.names) - 1, (shape[0], shape[1]))


def _row_numbers(tensor: int, shape: tuple[int, int]) -> Tensor:
    return (tensor * _IN_TABLES + torch.arange(shape[0]))[:, None].expand(shape)


def _column_numbers(tensor: int, shape: tuple[int, int]) -> Tensor:
    return torch.arange(shape[1]).expand(shape)


def _place(rows: Sequence[Tensor], columns: Sequence[Tensor], numbers: _Numbers) -> Place | None:
    """None where an output is made of several, or inputs differ: such a linear takes no adapter."""
    if not all(bool((part[:, 0] == part[:, -1]).all()) and bool((part[:, 0] >= 0).all()) for part in rows):
        return None
    inputs = columns[0][0]
    if not all(torch.equal(part[0], inputs) and torch.equal(part[-1], inputs) for part in columns):
        return None
    tensors, own = np.divmod(torch.cat([part[:, 0] for part in rows]).numpy(), _IN_TABLES)
    used, module_of = np.unique(tensors, return_inverse=True)
    return Place(
        modules=tuple(numbers.names[number] for number in used.tolist()),
        shapes=tuple(numbers.shapes[number] for number in used.tolist()),
        module_of=module_of,
        rows=own,
        columns=inputs.numpy(),
    )

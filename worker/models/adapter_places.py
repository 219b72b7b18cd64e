"""Places of adapters' modules in a rank's layout: which output of which module each output of a linear is.

They are found by reading the layout twice more, from tensors whose numbers are their own rows and columns: so linears
that are stacked, split, divided by heads or shared by ranks need no separate rules here.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.executors.adapters import EMBEDDING, HEAD, AdaptedLinear, Difference, LowRank, adaptable
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.step_batch import IntArray
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.models.adapter_folder import AdapterFolder
from holdfast.worker.models.adapter_tables import HEAD_MODULE, OwnTables, differing_row, table_module
from holdfast.worker.models.families import FAMILIES
from holdfast.worker.models.quantized_activations import Kept
from holdfast.worker.models.rank_share import RankShare
from holdfast.worker.models.stated_layout import LayoutBuilder
from holdfast.worker.models.stated_tensors import StoredTensors

_SUFFIX: Final = ".weight"
_IN_TABLES: Final = 2**40
"""A row's number is its tensor's, times this, and its own."""
_PROOF_LIMIT: Final = 1e-4
"""Largest error of an addition, as a share of its usual size: sums are float32."""

Differences: TypeAlias = Mapping[str, Sequence[Difference]]
"""Between what an executor adds at each place and the product of matrices, by module, for fixed inputs."""


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
    probe: Tensor
    """Fixed inputs, float32 [inputs]: each of this rank has the number that it has on a single rank. They are what any
    dtype holds.
    """

    def adapted(self, modules: Mapping[str, LowRank]) -> AdaptedLinear | None:
        """Matrices that an adapter adds here; None: it has none of these modules."""
        parts = tuple(modules.get(name) for name in self.modules)
        if not any(parts):
            return None
        return AdaptedLinear(
            parts=parts, part_of=self.module_of, rows=self.rows, columns=self.columns, probe=self.probe
        )


class AdapterPlaces:
    """The places of one rank's layout."""

    def __init__(self, config: Any, group: TensorParallelGroup, tables: OwnTables) -> None:
        """`config`: as `stated_config.py` has read it. `tables`: those of the checkpoint."""
        self._tables = tables
        rows, columns = _Numbers(_row_numbers), _Numbers(_column_numbers)
        by_rows, by_columns = (adaptable(_layout(config, numbers, group)) for numbers in (rows, columns))
        self._places = {
            place: _place(by_rows[place].weights, by_columns[place].weights, rows) for place in by_rows if place != HEAD
        }
        of_vocabulary = _of_vocabulary(config, group)
        self._places |= of_vocabulary
        self._of_vocabulary = {name for place in of_vocabulary.values() for name in place.modules}
        self._shapes = {
            name: shape
            for place in self._places.values()
            if place is not None
            for name, shape in zip(place.modules, place.shapes, strict=True)
        }
        """Shapes [outputs, inputs] of the modules that may have adapters, of the whole model."""

    def named(self, folder: AdapterFolder) -> AdapterFolder:
        """The folder with the names of the whole model's modules: PEFT leaves their first part out where an adapter was
        made of the model without its head, as for vectors.
        """
        prefixes = {name.split(".", 1)[0] + "." for name in self._shapes if "." in name}
        if len(prefixes) == 1 and not any(name in self._shapes for name in folder.modules):
            (prefix,) = prefixes
            if any(prefix + name in self._shapes for name in folder.modules):
                return folder.below(prefix)
        return folder

    def apply(self, folder: AdapterFolder) -> dict[str, AdaptedLinear]:
        """This rank's share of an adapter, by linear. Every tensor is applied wherever the model has its module.

        Raises `ConfigurationError` for a module that the model does not have, or whose linear takes no adapter, for a
        tensor of another shape, and for a target of the adapter without tensors.
        """
        for name, one in folder.modules.items():
            shape = self._shapes.get(name)
            if shape is None:
                raise folder.refused(
                    f"{name} is no module of this model that takes an adapter; such are the linears of attention and "
                    f"of dense MLPs, as {next(iter(self._shapes), 'none')}, the embedding and the head"
                )
            if (one.b.shape[0], one.a.shape[1]) != shape:
                raise folder.refused(
                    f"{name} has lora_A {one.a.shape} and lora_B {one.b.shape}, and the model's linear "
                    f"has {shape[1]} inputs and {shape[0]} outputs: it is an adapter of another model"
                )
        self._check_complete(folder)
        found = {key: place.adapted(folder.modules) for key, place in self._places.items() if place is not None}
        return {key: adapted for key, adapted in found.items() if adapted is not None}

    def prove(self, folder: AdapterFolder, differences: Differences, dtype: torch.dtype) -> bool:
        """Whether an adapter adds anything to fixed inputs. `differences`: by place, between the executor's addition,
        with the packed matrices and the products of a step, and that of a merged model's weights.

        Raises `ConfigurationError` if they are not equal, if a tensor is applied at two places or at none, and if
        rounding to the model's `dtype` leaves nothing of the adapter.
        """
        times, has_effect = Counter[str](), False
        for key, of_parts in differences.items():
            place = self._places[key]
            assert place is not None, "what is applied has a place"
            for name, (error, largest, usual) in zip(place.modules, of_parts, strict=True):
                if name not in folder.modules:
                    continue
                times[name] += 1
                if not error <= _PROOF_LIMIT * max(usual, largest):  # NaN is refused, too
                    raise folder.refused(
                        f"{name}: its addition to fixed inputs is not the product of its matrices in {dtype} (it "
                        f"differs by {error:.3g}, of numbers up to {max(usual, largest):.3g})"
                    )
                has_effect = has_effect or largest > 0
        if wrong := [name for name in folder.modules if times[name] != 1]:
            raise folder.refused(f"{wrong[0]} is applied {times[wrong[0]]} times, and must be applied once")
        if not has_effect and folder.has_effect:
            raise folder.refused(f"its numbers are too small for the model's {dtype}: nothing of it would be added")
        return has_effect

    def check_copies(self, folder: AdapterFolder) -> None:
        """Raises `ConfigurationError` where an adapter's copies of the model's table and head, which PEFT saves beside
        an adapter of theirs, are those of another model.
        """
        for name, copy in folder.form.copies.items():
            if name not in self._of_vocabulary or name not in folder.modules:
                raise folder.refused(f"{name}.base_layer.weight is no copy of the model's embedding or head")
            own = self._tables.of(name)
            if tuple(own.shape) != copy.shape:
                raise folder.refused(
                    f"{name}.base_layer.weight is {copy.shape}, and the model's weight {tuple(own.shape)}: it is an "
                    "adapter of another model"
                )
            if (row := differing_row(own, copy.of(folder.content))) is not None:
                raise folder.refused(
                    f"row {row} of {name}.base_layer.weight is not that of the model: its table was changed, or it is "
                    "an adapter of another model; serve the model that it was made of"
                )

    def _check_complete(self, folder: AdapterFolder) -> None:
        """Layers that it has nothing of may have been left out (`layers_to_transform`); the others are whole. All
        linears are those of layers, as PEFT has it.
        """
        layers = {_layer_of(name) for name in folder.modules}
        if folder.form.targets != "all-linear" and not folder.form.prefix:
            layers |= self._of_vocabulary
        if missing := [name for name in folder.form.misses(folder.given, self._shapes) if _layer_of(name) in layers]:
            raise folder.refused(f"target_modules name {missing[0]}, and there are no tensors of it")


def _of_vocabulary(config: Any, group: TensorParallelGroup) -> dict[str, Place]:
    """Places of the head, and of the embedding, of which ranks have parts; a last part is filled up with a row that is
    there.
    """
    family, hidden, vocab = FAMILIES[config.model_type], config.hidden_size, config.vocab_size
    count = -(-vocab // group.size)
    tokens, features = np.minimum(np.arange(count) + group.rank * count, vocab - 1), np.arange(hidden)
    head = _whole_place(HEAD_MODULE, (vocab, hidden), tokens, features)
    table = _whole_place(table_module(family), (hidden, vocab), features, tokens)
    return {HEAD: head, EMBEDDING: table}


def _whole_place(module: str, shape: tuple[int, int], rows: IntArray, columns: IntArray) -> Place:
    """A linear whose outputs are all of one module."""
    return Place(
        modules=(module,),
        shapes=(shape,),
        module_of=np.zeros(len(rows), dtype=np.int64),
        rows=rows,
        columns=columns,
        probe=_probe(columns),
    )


def _probe(columns: IntArray) -> Tensor:
    return ((torch.from_numpy(columns) * 37 + 11) % 127 - 63).float() / 64


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
        columns=np.ascontiguousarray(inputs.numpy()),
        probe=_probe(inputs.numpy()),
    )

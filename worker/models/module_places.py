"""Places of Hugging Face's modules in a rank's layout: which output of which module each output of a linear is.

They are found by reading the layout twice more, from tensors whose numbers are their own rows and columns: so linears
that are stacked, split, divided by heads or shared by ranks need no separate rules here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.executors.adapters import (
    ABSORB,
    EMBEDDING,
    EXPAND,
    HEAD,
    AdaptedLinear,
    LowRank,
    adaptable,
    place_of_all,
)
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.step_batch import IntArray
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.models.adapter_tables import HEAD_MODULE, table_module
from holdfast.worker.models.families import FAMILIES
from holdfast.worker.models.family import Family
from holdfast.worker.models.quantized_activations import Kept
from holdfast.worker.models.rank_share import RankShare
from holdfast.worker.models.stated_layout import LayoutBuilder
from holdfast.worker.models.stated_tensors import StoredTensors

_SUFFIX: Final = ".weight"
_IN_TABLES: Final = 2**40
"""A row's number is its tensor's, times this, and its own."""
_FIRST_EXPERT: Final = ".experts.0."


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """The modules of a place as one, as transformers keeps those of experts: gate and up."""

    module: str
    shape: tuple[int, int]
    """Outputs and inputs, of the whole model."""
    module_of: IntArray
    """[outputs] zeros"""
    rows: IntArray
    """[outputs] which output of it each is."""


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
    together: Together | None = None
    is_turned: bool = False
    """Whether its inputs are outputs of its module."""

    def modules_of(self, modules: Mapping[str, LowRank]) -> tuple[str, ...]:
        """Its modules as an adapter has them: each by itself, or all as one."""
        is_one = self.together is not None and self.together.module in modules
        return (self.together.module,) if self.together is not None and is_one else self.modules

    def adapted(self, modules: Mapping[str, LowRank]) -> AdaptedLinear | None:
        """Matrices that an adapter adds here; None: it has none of these modules."""
        names = self.modules_of(modules)
        parts = tuple(modules.get(name) for name in names)
        if not any(parts):
            return None
        if self.is_turned:
            parts = tuple(part and replace(part, a=part.b.turned, b=part.a.turned) for part in parts)
        of = self if self.together is None or names == self.modules else self.together
        return AdaptedLinear(parts=parts, part_of=of.module_of, rows=of.rows, columns=self.columns, probe=self.probe)

    def with_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of its modules, each by itself and all as one."""
        found = dict(zip(self.modules, self.shapes, strict=True))
        return found if self.together is None else found | {self.together.module: self.together.shape}


def places_of(config: Any, group: TensorParallelGroup) -> dict[str, Place | None]:
    """Places of a rank's layout; None: a linear that takes no adapter, as its outputs or inputs are of several modules.
    `config`: as `stated_config.py` has read it.
    """
    rows, columns = _Numbers(config, _row_numbers), _Numbers(config, _column_numbers)
    by_rows, by_columns = (adaptable(_layout(config, numbers, group)) for numbers in (rows, columns))
    found: dict[str, Place | None] = {}
    for place in by_rows:
        if place == HEAD:
            continue
        first, number = f"{place_of_all(place)}.0", place.rpartition(".")[2]
        if is_of_expert(place) and place != first:  # all experts of a layer are cut alike
            found[place] = _of_expert(found[first], number)
        elif is_of_expert(place):
            found[place] = _with_all(_place(by_rows[place].weights, by_columns[place].weights, rows), config)
        elif f".{ABSORB}." in place or f".{EXPAND}." in place:
            head = slice(int(number), int(number) + 1)
            found[place] = _of_head(place, by_rows[place].weights[head], by_columns[place].weights[head], rows)
        else:
            found[place] = _place(by_rows[place].weights, by_columns[place].weights, rows)
    return found | of_vocabulary(config, group)


def of_vocabulary(config: Any, group: TensorParallelGroup) -> dict[str, Place]:
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


def _layout(config: Any, numbers: "_Numbers", group: TensorParallelGroup) -> DecoderLayout:
    family = FAMILIES[config.model_type]
    tensors = StoredTensors(numbers, family, None)
    return LayoutBuilder(RankShare(config, family, tensors, group, torch.int64, Kept.NUMBERS)).layout()


class _Numbers:
    """Tensors of any name, whose values say which row, or column, of which tensor they are. Views of one vector."""

    left: Final[set[str]] = set()

    def __init__(self, config: Any, make: Callable[[int, tuple[int, int]], Tensor]) -> None:
        self._family: Family = FAMILIES[config.model_type]
        self._make = make
        self.names: list[str] = []
        self.shapes: list[tuple[int, int]] = []

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """None of experts' weights as one tensor: then they are taken one by one."""
        if len(shape) == 3 and shape[1] > 1:
            return None
        if len(shape) != 2 or not name.endswith(_SUFFIX):
            return torch.zeros((), dtype=torch.int64).expand(shape)
        if self._is_table(name):
            return torch.empty(shape, dtype=torch.int64, device="meta")
        self.names.append(name.removesuffix(_SUFFIX))
        self.shapes.append((shape[0], shape[1]))
        return self._make(len(self.names) - 1, (shape[0], shape[1]))

    def _is_table(self, name: str) -> bool:
        inputs = self._family.own_inputs
        is_context = inputs is not None and name == f"{self._family.base}{inputs.context}{_SUFFIX}"
        return ".layers." not in name and ".h." not in name and not is_context


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


def _of_head(place: str, rows: Sequence[Tensor], columns: Sequence[Tensor], numbers: _Numbers) -> Place | None:
    """The place of a head: keys are transposed."""
    if f".{EXPAND}." in place:
        return _place(rows, columns, numbers)
    found = _place([part.T for part in rows], [part.T for part in columns], numbers)
    if found is None:
        return None
    outputs = np.arange(len(found.columns))
    return replace(
        found,
        module_of=np.zeros_like(outputs),
        rows=found.columns,
        columns=found.rows,
        probe=_probe(found.rows),
        is_turned=True,
    )


def is_of_expert(place: str) -> bool:
    """Whether a place is of one expert of several."""
    return ".expert_" in place


def _of_expert(first: Place | None, number: str) -> Place | None:
    """The place of another expert than the first one."""
    if first is None:
        return None

    def of(name: str) -> str:
        return name.replace(_FIRST_EXPERT, f".experts.{number}.")

    together = None if first.together is None else replace(first.together, module=of(first.together.module))
    return replace(first, modules=tuple(map(of, first.modules)), together=together)


def _with_all(first: Place | None, config: Any) -> Place | None:
    """The place of the first expert with its modules as one: gates and ups, those of gpt-oss in turns."""
    if first is None or len(first.modules) != 2:
        return first
    moe, (outputs, inputs) = FAMILIES[config.model_type].moe, first.shapes[0]
    in_turns = moe is not None and moe.clamped
    rows = 2 * first.rows + first.module_of if in_turns else first.rows + first.module_of * outputs
    name = f"{first.modules[0].rpartition('.')[0]}.{GATE_UP}"
    together = Together(module=name, shape=(2 * outputs, inputs), module_of=np.zeros_like(rows), rows=rows)
    return replace(first, together=together)


GATE_UP: Final = "gate_up_proj"
"""Name of gate and up as one."""

"""Adapters: the addition of a low-rank adapter to the linears of a decoder layout, as all executors see it.

A linear of a layout is a stack of modules, some of which have separate adapters. So the addition is `b (scales * (a
x))`, with the ranks of all modules one after the other, and each output uses the ranks of its module.
"""

from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.executors.layout import Attention, DecoderLayout, Experts, Layer, Mlp
from holdfast.worker.executors.linears import Linear
from holdfast.worker.executors.state_layers import GatedDeltaNet
from holdfast.worker.executors.step_batch import IntArray


class StoredMatrix(NamedTuple):
    """A matrix in the content of a file, row by row."""

    dtype: torch.dtype
    shape: tuple[int, int]
    first: int
    """Place of its first byte."""
    strides: tuple[int, int] | None = None
    """Numbers from a row to the next, and from a column to the next; None: there are none between them."""

    @property
    def row_stride(self) -> int:
        return self.shape[1] if self.strides is None else self.strides[0]

    @property
    def step(self) -> int:
        """Numbers from a column to the next."""
        return 1 if self.strides is None else self.strides[1]

    @property
    def turned(self) -> "StoredMatrix":
        """The same, transposed."""
        return self._replace(shape=(self.shape[1], self.shape[0]), strides=(self.step, self.row_stride))

    @property
    def extent(self) -> int:
        """Numbers from its first to its last."""
        return (self.shape[0] - 1) * self.row_stride + (self.shape[1] - 1) * self.step + 1 if all(self.shape) else 0

    @property
    def end(self) -> int:
        """Place behind its last byte."""
        return self.first + self.extent * self.dtype.itemsize

    def of(self, content: memoryview) -> Tensor:
        """Its numbers, in place."""
        if not self.extent:
            return torch.empty(self.shape, dtype=self.dtype)
        numbers = torch.frombuffer(content, dtype=self.dtype, count=self.extent, offset=self.first)
        return numbers.as_strided(self.shape, (self.row_stride, self.step))


class FileContent(Protocol):
    """The content of a file, of which the last bytes may be on their way."""

    def there(self, least: int) -> memoryview:
        """The bytes that are there. Waits for this number, or all."""
        ...

    @property
    def whole(self) -> memoryview:
        """All bytes. Waits for them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Matrices of one module, which adds `scale * b a x`."""

    a: StoredMatrix
    """[rank, inputs], of a floating type."""
    b: StoredMatrix
    """[outputs, rank]"""
    scale: float


@dataclass(frozen=True, kw_only=True)
class AdaptedLinear:
    """Numbers that are added to one linear."""

    parts: tuple[LowRank | None, ...]
    """Matrices of each of its modules; None: the module has none."""
    part_of: IntArray
    """[outputs of this rank] the number of an output's module."""
    rows: IntArray
    """[outputs of this rank] which output of its module it is."""
    columns: IntArray
    """[inputs of this rank] which input of its modules each is."""
    probe: Tensor
    """[inputs of this rank] fixed inputs, float32, by which it is proved: numbers that the model's dtype has."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each part; 0: there is none."""
        return tuple(0 if part is None else part.a.shape[0] for part in self.parts)

    def some(self, outputs: slice) -> "AdaptedLinear":
        """The same of some outputs."""
        part_of, there = self.part_of[outputs], set(self.part_of[outputs].tolist())
        parts = tuple(part if number in there else None for number, part in enumerate(self.parts))
        return replace(self, parts=parts, part_of=part_of, rows=self.rows[outputs])

    @property
    def end(self) -> int:
        """Place behind the last byte of its matrices."""
        return max((max(part.a.end, part.b.end) for part in self.parts if part is not None), default=0)

    @property
    def is_run(self) -> bool:
        """Whether its inputs follow each other."""
        return np.array_equal(self.columns, np.arange(len(self.columns)) + self.columns[0])


HEAD: Final = "head"
EMBEDDING: Final = "embedding"
"""Places of the linear behind the layers, and of the table before them: its addition is that of a linear whose inputs
are one for the row's token, and zero for all others.
"""
ABSORB: Final = "absorb"
EXPAND: Final = "expand"
"""Places of the heads of latent attention's weight, whose keys take queries and whose values make outputs."""
STATE: Final = "state"
RATES: Final = "rates"
"""Linears of a layer that keeps a state: the inputs, and the last of their outputs where these are by themselves."""


def adaptable(layout: DecoderLayout) -> dict[str, Linear]:
    """The linears that adapters may add to, by their place in the layout. Those of a mixture's experts are
    `LAYER.expert_up.EXPERT` and `LAYER.expert_down.EXPERT`; of latent attention a place is one head of a linear.
    """
    found: dict[str, Linear | None] = {}
    for index, layer in enumerate(layout.layers):
        parts = _of_mixer(layer) | _of_mlps(layer)
        if layer.input is not None:
            parts |= {"input_gate": layer.input.gate, "input_projection": layer.input.projection}
        found |= {f"{index}.{name}": linear for name, linear in parts.items()}
    if layout.inputs is not None:
        found["inputs"] = layout.inputs.context
    return {place: linear for place, linear in found.items() if linear is not None} | {HEAD: layout.head}


def place_of_all(place: str) -> str:
    """The place of an expert's or a head's linear with those of the others; other linears are by themselves."""
    return place.rpartition(".")[0] if place.count(".") > 1 else place


def _of_mixer(layer: Layer) -> dict[str, Linear | None]:
    found: dict[str, Linear | None] = {}
    attention, state = layer.attention, layer.state
    if isinstance(attention, Attention):
        found |= {"qkv": attention.qkv, "output": attention.output}
    elif attention is not None:
        found |= {"qkv": attention.inputs, "queries": attention.queries, "output": attention.output}
        for head in range(attention.num_heads):
            found |= {f"{ABSORB}.{head}": attention.absorb, f"{EXPAND}.{head}": attention.expand}
    if state is not None:
        found[STATE] = state.inputs
        if state.output is not None:
            found["output"] = state.output
    if isinstance(state, GatedDeltaNet):
        found |= {RATES: state.rates, "gates": state.gates}
    return found


def _of_mlps(layer: Layer) -> dict[str, Linear | None]:
    found: dict[str, Linear | None] = {}
    mlp = layer.mlp
    if isinstance(mlp, Mlp):
        found |= {"up": mlp.up, "down": mlp.down}
    experts = layer.beside.experts if layer.beside is not None else mlp if isinstance(mlp, Experts) else None
    if experts is None:
        return found
    found |= {"router": experts.router, "shared_gate": experts.shared_gate, "latent": experts.latent}
    if experts.shared is not None:
        found |= {"shared_up": experts.shared.up, "shared_down": experts.shared.down}
    for number, expert in enumerate(experts.experts):
        found |= {f"expert_up.{number}": expert.up, f"expert_down.{number}": expert.down}
    return found


class Difference(NamedTuple):
    """Numbers that a step adds to the outputs of one module, beside the product of its matrices, for fixed inputs."""

    error: float
    """Largest difference; not a number where one of both is none."""
    largest: float
    """Largest number of that product."""
    usual: float
    """Usual size of such numbers: those of few ranks may cancel each other by chance."""

    def with_other(self, other: "Difference") -> "Difference":
        """The differences of a module whose outputs are in two parts; NaN stays."""
        return Difference(*(max(both, key=lambda one: (one != one, one)) for both in zip(self, other, strict=True)))

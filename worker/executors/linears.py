"""Linears and norms: the parts that the layers of a decoder layout are made of. Plain data."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from holdfast.worker.executors.coded import CodedMatrix
from holdfast.worker.executors.stored_matrix import StoredMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """`(x - mean?) * rsqrt(mean square + eps) * weight + bias`, over the last dimension."""

    kind: Literal["rms", "layer"]
    weight: Tensor
    """float32 [n], with an offset of one folded in where the family has it; [heads, head_dim] where heads differ."""
    bias: Tensor | None = None
    eps: float
    stays: bool = False
    """Its result takes the place of the residual stream: `x = norm(x)`. Of a norm before a half of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """`x W^T + b`. The parts are stacked along the outputs: queries, keys and values, or gate and up."""

    weights: tuple[Tensor, ...] = ()
    """Each [out, in], in the serving dtype; views of the checkpoint's memory where possible."""
    units: tuple[StoredMatrix, ...] = ()
    """Instead of weights: quantized weights, each with its `unit_form`, for inputs that are quantized in units too."""
    codes: tuple[StoredMatrix | CodedMatrix, ...] = ()
    """Instead of weights: quantized ones of the same `code_form` and with the same groups of inputs, whose numbers,
    each rounded to the serving dtype, are the weights; on a device one of all parts."""
    bias: Tensor | None = None
    """float32 [out of all parts]. Of a row-parallel linear: whole on every rank, added once after the sum. Of an
    expert's `down`: part of the first slice, and so of the first rank; zeros on the others."""

    @property
    def stored(self) -> tuple[StoredMatrix, ...]:
        """The parts that are units, or codes on no device."""
        return tuple(part for part in self.parts if isinstance(part, StoredMatrix))

    @property
    def out_features(self) -> int:
        return sum(int(weight.shape[0]) for weight in self.parts)

    @property
    def in_features(self) -> int:
        return int(self.parts[0].shape[1])

    @property
    def parts(self) -> tuple[Tensor | StoredMatrix | CodedMatrix, ...]:
        """The weights, or the units, or the codes."""
        return self.units or self.codes or self.weights

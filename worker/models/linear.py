"""Linear layers over one rank's slice of a weight, column- and row-parallel.

A linear starts plain, with the weight as it came; `settle` gives each a kernel of its device, whose rows do not depend
on their neighbours. A weight is kept once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.worker.executors.tensor_parallel import TensorParallelGroup

Kernel = Callable[[Tensor], Tensor]
"""Rows [..., in] to rows [..., out]."""


class ProductOf(Protocol):
    """Makes the kernel of a linear, which takes the weight [out, in] and the bias [out]."""

    def __call__(self, weight: Tensor, bias: Tensor | None, num_slices: int = 1, *, is_part: bool = False) -> Kernel:
        """Inputs are summed in this many slices, which are added as a binary tree. Results have the weight's dtype; as
        a part of a sum over ranks, float32.
        """
        ...


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Attributes of a weight that its kernel has taken, for modeling code: all but its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        return cls(weight.shape, weight.dtype, weight.device)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the values of a linear's weight are used past the linear: .{name}")


class Linear(nn.Module):
    """y = x W^T + b for x [..., in_features]; once settled, with the same bits for a row whatever else is in the call.

    `weight` is [out_features, in_features]. The layer keeps it as no parameter or buffer, and once settled maybe a
    packed copy instead: drop other references, and do not move or cast the layer.
    """

    weight: "Tensor | PackedWeight"
    """Packed once settled."""
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.num_slices = 1
        self.is_part = False
        """Whether its results are a part of a sum over ranks: once settled, float32."""
        self._kernel: Kernel | None = None

    def settle(self, kernel_of: ProductOf) -> None:
        """Takes the kernel that `kernel_of` makes of weight and bias, and lets the weight go. Once."""
        assert isinstance(self.weight, Tensor), "a linear is settled once"
        self._kernel = kernel_of(self.weight, self.bias, self.num_slices, is_part=self.is_part)
        self.weight = PackedWeight.of(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] to [..., out_features], of x's dtype."""
        if self._kernel is None:
            assert isinstance(self.weight, Tensor)
            return F.linear(x, self.weight, self.bias)
        return self._kernel(x)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def settle(
    module: nn.Module,
    kernel_of: ProductOf,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Settles every linear inside `module`. `progress` gets linears done and in all."""
    linears = [part for part in module.modules() if isinstance(part, Linear)]
    for done, linear in enumerate(linears, start=1):
        linear.settle(kernel_of)
        progress(done, len(linears))


class ColumnParallelLinear(nn.Module):
    """This rank's share of the outputs: weight [out / size, in], bias [out / size]; x has all inputs.

    With `gather_output` every rank gets all outputs, in rank order.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        group: TensorParallelGroup,
        *,
        gather_output: bool = False,
    ) -> None:
        super().__init__()
        self.linear = Linear(weight, bias)
        self._group = group
        self.gathers = gather_output and group.size > 1

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] to this rank's outputs; to all outputs if the layer gathers."""
        y: Tensor = self.linear(x)
        return self._group.all_gather(y) if self.gathers else y


class RowParallelLinear(nn.Module):
    """This rank's share of the inputs: weight [out, in / size]; the ranks' results are summed.

    `bias` [out] is whole on every rank and added once, after the sum. With `split_input` x has all inputs and this
    rank takes its share, else x is that share. A rank's inputs are summed in `num_slices`, float32; slices and ranks
    are one binary tree, and the sum is rounded once: any number of ranks that hold whole subtrees has the same bits.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        group: TensorParallelGroup,
        *,
        num_slices: int = 1,
        split_input: bool = False,
    ) -> None:
        super().__init__()
        whole = group.size == 1
        self.linear = Linear(weight, bias if whole else None)
        self.linear.num_slices, self.linear.is_part = num_slices, not whole
        self.bias = None if bias is None or whole else bias.detach()
        self._group = group
        self.splits = split_input and not whole
        self._first_input = group.rank * self.linear.in_features

    def forward(self, x: Tensor) -> Tensor:
        """x with this rank's inputs to all outputs, summed over ranks in float32 in a fixed tree."""
        if self.splits:
            x = x.narrow(-1, self._first_input, self.linear.in_features)
        part: Tensor = self.linear(x)
        if self._group.size == 1:
            return part
        dtype = part.dtype if isinstance(self.linear.weight, Tensor) else self.linear.dtype
        total = tree_sum(self._group.all_gather(part[None], dim=0).float())
        return (total if self.bias is None else total + self.bias).to(dtype)


def tree_sum(parts: Tensor) -> Tensor:
    """The sum of parts [count, ...], added as a binary tree: neighbours, then neighbours of those."""
    while len(parts) > 1:
        pairs, rest = len(parts) // 2 * 2, parts[len(parts) // 2 * 2 :]
        parts = torch.cat((parts[0:pairs:2] + parts[1:pairs:2], rest))
    return parts[0]


class VocabParallelEmbedding(nn.Module):
    """Rows `first_row` to `first_row + len(weight_slice) - 1` of the table. Every rank gets all hidden states."""

    def __init__(self, weight_slice: Tensor, first_row: int, group: TensorParallelGroup) -> None:
        super().__init__()
        self.register_buffer("weight", weight_slice.detach(), persistent=False)
        self.weight: Tensor
        self._first_row = first_row
        self._group = group

    def forward(self, token_ids: Tensor) -> Tensor:
        """[...] -> [..., hidden]. A token id outside the whole table gives zeros, except with one rank: IndexError."""
        if self._group.size == 1:
            return F.embedding(token_ids, self.weight)
        rows = token_ids - self._first_row
        elsewhere = (rows < 0) | (rows >= self.weight.shape[0])
        hidden = F.embedding(rows.masked_fill_(elsewhere, 0), self.weight)
        return self._group.all_reduce(hidden.masked_fill_(elsewhere.unsqueeze(-1), 0))


class ScaledEmbedding(nn.Module):
    """An embedding whose vectors are multiplied by a constant (Gemma 3)."""

    scale: Tensor

    def __init__(self, embedding: nn.Module, scale: Tensor) -> None:
        super().__init__()
        self.embedding = embedding
        self.register_buffer("scale", scale)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Token ids [n] to vectors [n, hidden], multiplied by the scale."""
        vectors: Tensor = self.embedding(token_ids)
        return vectors * self.scale


class VocabParallelHead(nn.Module):
    """This rank's rows of the output table. Every rank gets all logits, cut to `vocab_size`."""

    def __init__(
        self,
        weight_slice: Tensor,
        bias_slice: Tensor | None,
        group: TensorParallelGroup,
        *,
        vocab_size: int,
    ) -> None:
        super().__init__()
        self.linear = Linear(weight_slice, bias_slice)
        self._group = group
        self.vocab_size = vocab_size

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab_size]."""
        logits = self._group.all_gather(self.linear(x))
        return logits[..., : self.vocab_size]


VECTOR = 64
"""A whole number of steps of torch's vector loops on CPUs, in numbers of any dtype."""


class RowActivation(nn.Module):
    """An activation, called on rows of whole vectors.

    Torch computes a tensor's numbers in vectors and the remainder with another formula of exp: which numbers are in the
    remainder depends on the number of rows, unless each row is a whole number of vectors.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    @staticmethod
    def can_replace(module: nn.Module) -> bool:
        """Whether this is one of transformers' activations without weights."""
        from transformers.activations import ACT2CLS

        classes = {entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()}
        return type(module) in classes and not list(module.parameters())

    def forward(self, x: Tensor) -> Tensor:
        """Activation of x [..., features] in whole vectors, so that a row's bits do not depend on its place."""
        padding = -x.shape[-1] % VECTOR
        if padding == 0:
            result: Tensor = self.activation(x)
            return result
        padded: Tensor = self.activation(F.pad(x, (0, padding)))
        return padded[..., :-padding]

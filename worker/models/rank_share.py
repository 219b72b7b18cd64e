"""One rank's share of the tensors of a stated family: linears, norms and tables as parts of a decoder layout."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.executors.coded import UNIT, CodeKind
from holdfast.worker.executors.layout_arithmetic import slices_of_rank
from holdfast.worker.executors.linears import Linear, Norm
from holdfast.worker.executors.stored_matrix import StoredMatrix
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.models.checks import check_heads
from holdfast.worker.models.family import Family, NormKind
from holdfast.worker.models.parallel_plan import Segment, share_of_vocabulary
from holdfast.worker.models.quantized_activations import Kept
from holdfast.worker.models.stated_tensors import StoredTensors, Weight

_OFFSETS = {NormKind.RMS_PLUS_ONE: 1.0, NormKind.LAYER_PLUS_ONE: 1.0}  # added to the stored weight
_EPS_WITHOUT_WEIGHTS = 1e-5
"""Written into the code of the one norm that has no weights (OLMo)."""

Outputs = Sequence[tuple[int, int | None]]
"""Stacked linears: the number of outputs of each, and the most equal chunks in which ranks share them."""


class RankShare:
    """Takes tensors by the names of Hugging Face's modules. All are of `dtype` afterwards, norms and biases float32."""

    def __init__(
        self,
        config: Any,
        family: Family,
        tensors: StoredTensors,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        kept: Kept,
    ) -> None:
        """`kept`: what quantized weights stay, where their form allows it.

        Raises `UnsupportedModelError` if this many ranks cannot share the model.
        """
        self.config = config
        self.family = family
        self.tensors = tensors
        self.rank, self.size = group.rank, group.size
        self.dtype = dtype
        self._kept = kept
        self._shares: tuple[int, ...] | None = None
        if group.size > 1:
            self._shares = check_heads(config, group.size, may_be_uneven=family.may_be_uneven)

    @property
    def keeps_units(self) -> bool:
        """Whether quantized weights stay units, where their form allows it."""
        return self._kept is Kept.UNITS

    def part(self, length: int, num_chunks: int | None = None) -> tuple[int, int]:
        """Start and length of this rank's share of this many features. With fewer chunks than ranks, neighbours have
        the same.
        """
        if self._shares is None:
            segment = Segment(length, self.size if num_chunks is None else min(num_chunks, self.size))
        else:
            segment = Segment(length, sum(self._shares), self._shares)
        if length % segment.num_chunks:
            reason = f"{length} features cannot be shared by {self.size} ranks"
            raise UnsupportedModelError(self.config.model_type, reason, "Choose another tensor_parallel_size")
        return segment.of_rank(self.rank, self.size)

    def slices(self, length: int) -> int:
        """Slices of this rank's share of a sum over this many heads, or inputs, of the whole model."""
        config = self.config
        return slices_of_rank(length, config.num_attention_heads, config.num_key_value_heads, self.rank, self.size)

    # --- linears ---

    def columns(
        self,
        names: Sequence[str],
        outputs: Outputs,
        num_inputs: int,
        *,
        has_bias: bool,
        may_stay: bool = True,
        together: int = 1,
    ) -> Linear:
        """Linears whose outputs ranks share, stacked: one for each of `outputs`, or a fused one. `may_stay`:
        quantized. `together`: each part is packed in runs of a multiple of this many outputs, on any rank.
        """
        lengths = _lengths(names, outputs)
        biases = [self.tensors.take(f"{name}.bias", (n,)) for name, n in zip(names, lengths, strict=True) if has_bias]
        bias = torch.cat([self.floats(share) for share in self._shared(biases, outputs)]) if biases else None
        return self.stacked(self.shares(names, outputs, num_inputs), bias, may_stay=may_stay, together=together)

    def shares(self, names: Sequence[str], outputs: Outputs, num_inputs: int) -> list[Weight]:
        """This rank's share of each of the outputs of `columns`, views."""
        lengths = _lengths(names, outputs)
        wholes = [self.tensors.take(f"{name}.weight", (n, num_inputs)) for name, n in zip(names, lengths, strict=True)]
        return self._shared(wholes, outputs)

    def stacked(
        self, shares: Sequence[Weight], bias: Tensor | None = None, *, may_stay: bool = True, together: int = 1
    ) -> Linear:
        """This rank's shares of some weights, stacked along the outputs; see `columns`."""
        stored = [share for share in shares if may_stay and isinstance(share, StoredMatrix)]
        if len(stored) == len(shares) and all(self._are_units(share, 1) for share in stored):
            if together % UNIT == 0 or len({share.unit_form for share in stored}) == 1:
                return Linear(units=tuple(stored), bias=bias)
        elif len(stored) == len(shares) and all(map(self._are_codes, stored)) and _may_be_stacked(stored):
            return Linear(codes=tuple(stored), bias=bias)
        return Linear(weights=tuple(self.numbers(share) for share in shares), bias=bias)

    def _shared(self, wholes: Sequence[Weight], outputs: Outputs) -> list[Weight]:
        """This rank's share of each of the outputs, views; of one whole, they follow each other in it."""
        shares: list[Weight] = []
        start = 0
        for index, (size, num_chunks) in enumerate(outputs if wholes else ()):
            first, length = self.part(size, num_chunks)
            whole = wholes[index if len(wholes) == len(outputs) else 0]
            shares.append(whole.narrow(0, start + first, length))
            start += size if len(wholes) != len(outputs) else 0
        return shares

    def rows(self, name: str, shape: tuple[int, int], slices: int, *, has_bias: bool, may_stay: bool = True) -> Linear:
        """A linear whose inputs ranks share; `slices` of this rank's share of the sum. Its bias is whole."""
        share = self.tensors.take(f"{name}.weight", shape).narrow(1, *self.part(shape[1]))
        bias = self.floats(self.tensors.take(f"{name}.bias", shape[:1])) if has_bias else None
        return self.of_inputs(share, slices, bias, may_stay=may_stay)

    def of_inputs(self, share: Weight, slices: int, bias: Tensor | None = None, *, may_stay: bool = True) -> Linear:
        """A linear with this rank's share of the inputs; see `rows`."""
        if isinstance(share, StoredMatrix) and may_stay and self._are_units(share, slices):
            return Linear(units=(share,), bias=bias)
        if isinstance(share, StoredMatrix) and may_stay and self._are_codes(share):
            return Linear(codes=(share,), bias=bias)
        return Linear(weights=(self.numbers(share),), bias=bias)

    def whole(self, name: str, shape: tuple[int, int], *, has_bias: bool = False, exact: bool = False) -> Linear:
        """A linear that every rank has all of; `exact`: in float32, as it is stored."""
        bias = self.floats(self.tensors.take(f"{name}.bias", shape[:1])) if has_bias else None
        weight = self.tensors.take(f"{name}.weight", shape)
        numbers = weight.to(torch.float32) if exact and self.dtype.is_floating_point else self.numbers(weight)
        return Linear(weights=(numbers,), bias=bias)

    def rounded_scale(self, scale: float) -> float:
        """The scale of an embedding: it is loaded in the checkpoint's dtype, as the weights are."""
        return float(torch.tensor(scale).to(self.config.dtype or self.dtype).to(self.dtype).item())

    def vector(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The vector in float32, as it is stored."""
        return self.tensors.take(name, shape).to(torch.float32).flatten()

    def _are_units(self, share: StoredMatrix, slices: int) -> bool:
        """Whether the executor may multiply it as units: each slice of a sum over its inputs has whole ones."""
        is_fit = share.unit_form is not None and share.shape[1] % (slices * UNIT) == 0
        return self._kept is Kept.UNITS and is_fit

    def _are_codes(self, share: StoredMatrix) -> bool:
        """Whether the executor takes it by its codes. On CPUs, floating-point weights are converted to its numbers, one
        piece at a time.
        """
        form = share.code_form
        if self._kept is Kept.UNITS:
            return form is not None and form.kind in (CodeKind.E4M3, CodeKind.E5M2)
        return self._kept is Kept.CODES and form is not None

    def numbers(self, share: Weight) -> Tensor:
        """Numbers in the served dtype."""
        return self.tensors.numbers(share, self.dtype)

    def floats(self, share: Weight) -> Tensor:
        """Numbers of the served type, as float32."""
        return self.numbers(share).float()

    # --- the vocabulary ---

    def head(self, whole: Weight, bias: Weight | None, *, is_table: bool) -> Linear:
        """This rank's rows of the head. A head that is also the embedding table is not coded, since its rows are
        read.
        """
        own = None if bias is None else self._table(bias).float()
        share = share_of_vocabulary(whole, self.rank, self.size)
        if isinstance(share, StoredMatrix) and self._are_units(share, 1):
            return Linear(units=(share,), bias=own)
        if isinstance(share, StoredMatrix) and self._are_codes(share) and not is_table:
            return Linear(codes=(share,), bias=own)
        return Linear(weights=(self._table(whole),), bias=own)

    def embedding(self, whole: Weight, tied: Linear | None) -> Tensor:
        """This rank's rows of the table; with a head of the same numbers, that one's."""
        if tied is None:
            return self._table(whole)
        if tied.units:
            return torch.empty(tied.units[0].shape, dtype=self.dtype, device="meta")
        return tied.weights[0]

    def table_of_rows(self, whole: Weight) -> Tensor | Linear:
        """A table that every rank has all of, and of which rows are read: numbers, or units where they may stay."""
        if isinstance(whole, StoredMatrix) and self._are_units(whole, 1):
            return Linear(units=(whole,))
        return self.numbers(whole)

    def _table(self, whole: Weight) -> Tensor:
        rows = self.numbers(share_of_vocabulary(whole, self.rank, self.size))
        missing = -(-len(whole) // self.size) - len(rows)
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows

    # --- norms ---

    def norm(self, name: str, shape: tuple[int, ...], *, has_bias: bool) -> Norm:
        """A norm of the family's kind."""
        kind = self.family.norm
        if kind is NormKind.LAYER_WITHOUT_WEIGHTS:
            return Norm(kind="layer", weight=torch.ones(shape), eps=_EPS_WITHOUT_WEIGHTS)
        weight = self.floats(self.tensors.take(f"{name}.weight", shape))
        bias = self.floats(self.tensors.take(f"{name}.bias", shape)) if has_bias else None
        return Norm(
            kind="rms" if kind in (NormKind.RMS, NormKind.RMS_PLUS_ONE) else "layer",
            weight=weight + _OFFSETS.get(kind, 0.0),
            bias=bias,
            eps=float(getattr(self.config, self.family.eps)),
        )


def _lengths(names: Sequence[str], outputs: Outputs) -> list[int]:
    """Outputs of each linear."""
    sizes = [size for size, _ in outputs]
    return sizes if len(names) == len(sizes) else [sum(sizes)]


def joined(linears: Sequence[Linear], num_slices: int, dtype: torch.dtype) -> Linear:
    """Row-parallel linears as one, whose inputs are, slice by slice, those of the first, then those of the next.
    Quantized ones are dequantized to `dtype`: units of one slice would be of two weights.
    """
    numbers = [(*one.weights, *(stored.to(dtype) for stored in one.stored))[0] for one in linears]
    parts = [one.reshape(len(one), num_slices, -1) for one in numbers]
    biases = [one.bias for one in linears if one.bias is not None]
    bias = torch.stack(biases).sum(0) if biases else None
    return Linear(weights=(torch.cat(parts, -1).flatten(1),), bias=bias)


def _may_be_stacked(codes: Sequence[StoredMatrix]) -> bool:
    first, *others = codes
    return all(
        other.code_form == first.code_form and torch.equal(other.input_groups, first.input_groups) for other in others
    )

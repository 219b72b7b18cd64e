"""Tensors of a plain checkpoint that are quantized as they are read: codes and scales are chosen when some rows of a
rank's share of a weight are packed, as if the whole had been quantized first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from holdfast.worker.config import Quantization
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.coded import CodedRows, CodeForm, UnitForm, Units
from holdfast.worker.executors.cpu.weight_codes import eight_bit_codes, searched_codes
from holdfast.worker.executors.mapped_files import discard_contents
from holdfast.worker.executors.stored_matrix import BytesAndScales, StoredMatrix
from holdfast.worker.models.formats.codes import Codes, PackedCodes, PlainCodes
from holdfast.worker.models.formats.quantization_rule import (
    HEADS,
    has_layers_experts,
    is_head,
    is_table,
    rule_name,
    scheme_for,
)
from holdfast.worker.models.formats.quantization_scheme import UNUSED, WeightScheme
from holdfast.worker.models.formats.quantized_weight import QuantizedWeight
from holdfast.worker.models.safetensors_files import mapped_tensors

_TRANSPOSED: Final = ("gpt2",)
"""Model types whose linears lie as [in, out]."""

_STACKED: Final = ("gemma4_text", "granitemoe", "granitemoehybrid")
"""Model types whose experts lie in one tensor [expert, out, in]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainWeight(StoredMatrix):
    """A weight [out, in] that is quantized, or a range of its rows and columns. Rows are quantized whenever they are
    read: only the checkpoint is kept, and names the codes where processes share them.
    """

    source: Tensor
    """The whole weight, mapped."""
    scheme: WeightScheme
    rule: str
    """Name of the rule by which codes are chosen."""

    @property
    def mapped(self) -> Tensor:
        return self.source

    def numbers(self, first: int, last: int) -> Tensor:
        return self._quantized(first, last).numbers(0, last - first)

    def bytes_and_scales(self, first: int, last: int) -> BytesAndScales | None:
        return self._quantized(first, last).bytes_and_scales(0, last - first)

    @property
    def unit_form(self) -> UnitForm | None:
        return self._without_rows.unit_form

    def units(self, first: int, last: int) -> Units:
        return self._quantized(first, last).units(0, last - first)

    @property
    def code_form(self) -> CodeForm | None:
        return self._without_rows.code_form

    @property
    def input_groups(self) -> Tensor:
        return self._without_rows.input_groups

    def coded(self, first: int, last: int) -> CodedRows:
        return self._quantized(first, last).coded(0, last - first)

    def with_codes(self) -> StoredMatrix:
        made = replace(self.quantized(), made_of=self).filled_up(len(self))
        discard_contents(self.source[slice(*self.rows)])
        return made

    @property
    def _without_rows(self) -> QuantizedWeight:
        return self._quantized(self.rows[0], self.rows[0])

    def _quantized(self, first: int, last: int) -> QuantizedWeight:
        return self.narrow(0, first - self.rows[0], last - first).quantized()

    def quantized(self) -> QuantizedWeight:
        """The codes and scales that the whole weight has in this range. Raises `NotFiniteError`."""
        outputs, group = self.scheme.block
        assert outputs == 1, "an output has separate scales"
        first, last = _whole_groups(self.columns, group or self.source.shape[1])
        own = self.source[slice(*self.rows)]
        codes, scales = self._chosen(own, (first, last) if group else self.columns)
        first = first if group else self.columns[0]
        length = self.columns[1] - first
        return QuantizedWeight(
            rows=(0, len(own)),
            columns=(self.columns[0] - first, length),
            codes=codes,
            scales=scales,
            zeros=None,
            block_rows=1,
            groups=torch.arange(last - first) // (group or last - first),
            is_in_file=False,
        )

    def _chosen(self, own: Tensor, columns: tuple[int, int]) -> tuple[Codes, Tensor]:
        """Codes of the range's rows in these columns."""
        scheme = self.scheme
        if scheme.bits == 4:
            words, scales = searched_codes(own[:, slice(*columns)], cast(int, scheme.block[1]))
            return PackedCodes(stored=words, bits=4, packed_dim=1, middle=8), scales
        dtype = torch.float8_e4m3fn if scheme.is_float else torch.int8
        values, scales = eight_bit_codes(own, dtype, columns)
        return PlainCodes(values), scales


@dataclass(frozen=True, slots=True)
class PlainExperts:
    """Weights [expert, out, in] of experts that lie in one tensor."""

    experts: tuple[PlainWeight, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.experts), *self.experts[0].shape

    def to(self, dtype: torch.dtype) -> Tensor:
        """Numbers, each rounded once, in separate memory."""
        return torch.stack([expert.to(dtype) for expert in self.experts])


def _whole_groups(columns: tuple[int, int], group: int) -> tuple[int, int]:
    return columns[0] // group * group, -(-columns[1] // group) * group


class QuantizingTensors:
    """The tensors of a plain checkpoint, including the ones that stay unquantized. Each is taken once."""

    def __init__(self, folder: Path, config: Mapping[str, Any], quantization: Quantization) -> None:
        """Opens the checkpoint in `folder`, whose config.json has `config`. The head of a tied model is made of the
        table.

        Raises `ConfigurationError` for files that cannot be read, and for models whose weights lie in another way.
        """
        self._tensors = mapped_tensors(folder)
        self._quantization = quantization
        self._is_head_table = bool(config.get("tie_word_embeddings")) or not any(map(is_head, self._tensors))
        self._table = next((one for name, one in self._tensors.items() if is_table(name)), None)
        self._check(str(config.get("model_type")))

    def _check(self, model_type: str) -> None:
        if model_type not in _STACKED and (name := self.of_several_experts) is not None:
            raise self._refused(f"{name} has the weights of several experts, of which codes are not made at load")
        if model_type in _TRANSPOSED:
            raise self._refused(f"linears of {model_type} lie as [in, out], of which codes are not made at load")

    def _refused(self, reason: str) -> ConfigurationError:
        setting = f"model.quantization = {self._quantization!r}"
        return ConfigurationError(f"{setting}: {reason}; leave --quantization unset")

    @property
    def of_several_experts(self) -> str | None:
        """A tensor with the weights of several experts, by its name."""
        named = (name for name, one in self._tensors.items() if has_layers_experts(name, tuple(one.values.shape)))
        return next(named, None)

    @property
    def names(self) -> list[str]:
        """Names of all tensors that are left, and of the head that is made of the table."""
        return [*sorted(self.left), *([HEADS[0]] if self._table is not None and self._is_head_table else [])]

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor | PlainWeight | PlainExperts | None:
        """The tensor of a parameter; None: there is no tensor of this name."""
        stored = self._tensors.pop(name, None)
        if is_head(name) and self._is_head_table:
            stored = self._table
        return None if stored is None else self._taken(name, stored.values)

    def _taken(self, name: str, values: Tensor) -> Tensor | PlainWeight | PlainExperts:
        scheme = scheme_for(self._quantization, name, tuple(values.shape))
        if scheme is None:
            return values
        if values.dim() > 2:
            return PlainExperts(tuple(self._weight(expert, scheme) for expert in values))
        return self._weight(values, scheme)

    def _weight(self, values: Tensor, scheme: WeightScheme) -> PlainWeight:
        outputs, inputs = values.shape
        rule = rule_name(self._quantization)
        return PlainWeight(rows=(0, outputs), columns=(0, inputs), source=values, scheme=scheme, rule=rule)

    @property
    def left(self) -> set[str]:
        """Names of unused tensors that matter."""
        unused = {name for name in self._tensors if name.rpartition(".")[2] in UNUSED}
        return self._tensors.keys() - unused - {name for name in self._tensors if self._is_head_table and is_head(name)}

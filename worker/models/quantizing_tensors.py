"""Tensors of a plain checkpoint that are quantized as they are taken: codes and scales are chosen when a rank has its
share of a weight, as if the whole had been quantized first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from holdfast.worker.config import Quantization
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.cpu.weight_codes import eight_bit_codes, searched_codes
from holdfast.worker.executors.mapped_files import discard_contents
from holdfast.worker.executors.stored_matrix import StoredMatrix
from holdfast.worker.models.quantization.codes import Codes, PackedCodes, PlainCodes
from holdfast.worker.models.quantization.rule import HEADS, has_layers_experts, is_head, is_table, scheme_for
from holdfast.worker.models.quantization.scheme import UNUSED, WeightScheme
from holdfast.worker.models.quantization.weight import QuantizedWeight
from holdfast.worker.models.safetensors_files import MappedTensor, mapped_tensors

_TRANSPOSED: Final = ("gpt2",)
"""Model types whose linears lie as [in, out]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainWeight(StoredMatrix):
    """A weight [out, in] to be quantized, or a range of its rows and columns."""

    name: str
    source: Tensor
    """The whole weight, mapped."""
    scheme: WeightScheme

    @property
    def mapped(self) -> Tensor:
        return self.source

    def numbers(self, first: int, last: int) -> Tensor:
        quantized = self.narrow(0, first - self.rows[0], last - first).quantized()
        return quantized.numbers(0, last - first)

    def to(self, dtype: torch.dtype) -> Tensor:
        return self.quantized().to(dtype)

    def quantized(self) -> QuantizedWeight:
        """The codes and scales that the whole weight has in this range.

        Raises `ConfigurationError` that names a weight with numbers that are not finite.
        """
        outputs, group = self.scheme.block
        assert outputs == 1, "an output has separate scales"
        first, last = _whole_groups(self.columns, group or self.source.shape[1])
        own = self.source[slice(*self.rows)]
        try:
            codes, scales = self._chosen(own, (first, last) if group else self.columns)
        except ValueError as error:
            raise ConfigurationError(f"{self.name}: {error}; fetch the file again") from error
        discard_contents(own)
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
        several = (name for name, one in self._tensors.items() if has_layers_experts(name, tuple(one.values.shape)))
        if (name := next(several, None)) is not None:
            raise self._refused(f"{name} has the weights of several experts, of which codes are not made at load")
        if model_type in _TRANSPOSED:
            raise self._refused(f"linears of {model_type} lie as [in, out], of which codes are not made at load")

    def _refused(self, reason: str) -> ConfigurationError:
        setting = f"model.quantization = {self._quantization!r}"
        return ConfigurationError(f"{setting}: {reason}; leave --quantization unset")

    @property
    def names(self) -> list[str]:
        """Names of all tensors that are left, and of the head that is made of the table."""
        return [*sorted(self.left), *([HEADS[0]] if self._table is not None and self._is_head_table else [])]

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor | PlainWeight | None:
        """The tensor of a parameter; None: there is no tensor of this name."""
        stored = self._tensors.pop(name, None)
        if is_head(name) and self._is_head_table:
            stored = self._table
        return None if stored is None else self._taken(name, stored)

    def _taken(self, name: str, stored: MappedTensor) -> Tensor | PlainWeight:
        values = stored.values
        shape = tuple(values.shape)
        scheme = scheme_for(self._quantization, name, shape)
        if scheme is None:
            return values
        return PlainWeight(
            rows=(0, shape[0]),
            columns=(0, shape[1]),
            name=f"{stored.file}: {name}",
            source=values,
            scheme=scheme,
        )

    @property
    def left(self) -> set[str]:
        """Names of unused tensors that matter."""
        unused = {name for name in self._tensors if name.rpartition(".")[2] in UNUSED}
        return self._tensors.keys() - unused - {name for name in self._tensors if self._is_head_table and is_head(name)}

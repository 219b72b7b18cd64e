"""The model's table and head, beside the copies that PEFT saves with adapters of the embedding and of the head."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from holdfast.worker.config import ModelConfig
from holdfast.worker.models.families import FAMILIES
from holdfast.worker.models.family import Family
from holdfast.worker.models.stated_tensors import Weight, stored_tensors

HEAD_MODULE: Final = "lm_head"
_ROWS_AT_ONCE: Final = 4096  # rows
_ROUNDED, _QUANTIZED = 0.004, 0.3
"""Largest difference between a row and its copy, as a share of the row's norm: of one that was rounded to another type,
and of a quantized one.
"""
_LEAST_NORM: Final = 1e-6
"""Norm that a row is taken to have at least: those of tokens that no text has may be zeros."""


def table_module(family: Family) -> str:
    """Hugging Face's name of the embedding."""
    return f"{family.base}{family.embedding}"


@dataclass(frozen=True, slots=True)
class OwnTables:
    """Table and head of a checkpoint, read again when they are asked for."""

    config: ModelConfig
    stated: Any
    """The model's config, as `stated_config.py` has read it."""
    folder: Path

    def of(self, module: str) -> Weight:
        """The whole weight [vocabulary, hidden] of a module; a head that is tied is the table."""
        family = FAMILIES[self.stated.model_type]
        stored = stored_tensors(self.config, self.stated, self.folder, family)
        name = table_module(family) if self.stated.tie_word_embeddings else module
        return stored.take(f"{name}.weight", (self.stated.vocab_size, self.stated.hidden_size))


def differing_row(own: Weight, copy: Tensor) -> int | None:
    """The first row of a table [rows, columns] that differs from its copy by more than its own rounding; None: all are
    the same.
    """
    limit = _ROUNDED if isinstance(own, Tensor) else _QUANTIZED
    for first in range(0, len(copy), _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, len(copy))
        numbers = (own[first:last] if isinstance(own, Tensor) else own.numbers(first, last)).float()
        errors = (numbers - copy[first:last].float()).norm(dim=1)
        is_same = errors <= limit * numbers.norm(dim=1).clamp(min=_LEAST_NORM)  # NaN is not
        if not bool(is_same.all()):
            return first + int((~is_same).nonzero()[0])
    return None

"""Tensors of a checkpoint of a stated family, by the names of Hugging Face's modules. Each is taken exactly once."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor

from holdfast.worker.config import ModelConfig
from holdfast.worker.executors.stored_matrix import StoredMatrix
from holdfast.worker.models.compact import CompactTensors, compact_tensors
from holdfast.worker.models.family import Family
from holdfast.worker.models.safetensors_files import mapped_tensors
from holdfast.worker.models.stated_config import NotStated
from holdfast.worker.models.weights import DummyWeights

Weight = Tensor | StoredMatrix
"""A checkpoint's tensor, a view of a mapped file: its numbers, or their sources."""

_UNUSED: Final = r"rotary_emb\.inv_freq$|\.attention\.(masked_)?bias$|^score\.weight$"
"""Tensors of old checkpoints that transformers computes now, and the head of pooled models (`pooling.py`)."""


class Tensors(Protocol):
    """Tensors of `CompactTensors`' interface."""

    def take(self, name: str, shape: tuple[int, ...], /) -> Any: ...

    @property
    def left(self) -> set[str]: ...


class StoredTensors:
    """The tensors of a checkpoint."""

    def __init__(self, source: Tensors, family: Family, dtype: torch.dtype | None) -> None:
        """`dtype`: what numbers are rounded to before they are of the served type; None: not."""
        self._source = source
        self._family = family
        self._dtype = dtype

    def find(self, name: str, shape: tuple[int, ...]) -> Weight | None:
        """The tensor of this name and shape; None: there is no tensor of this name. Raises `NotStated` for another
        shape.
        """
        for known in self._names(name):
            if (found := self._source.take(known, shape)) is not None:
                if tuple(found.shape) != shape:
                    raise NotStated(f"the tensor {name} has shape {tuple(found.shape)}, not {shape}")
                return cast(Weight, found)
        return None

    def take(self, name: str, shape: tuple[int, ...]) -> Weight:
        """Same as `find`. Raises `NotStated` if there is none."""
        found = self.find(name, shape)
        if found is None:
            raise NotStated(f"the tensor {name} is missing")
        return found

    @property
    def may_repeat_head(self) -> bool:
        """Whether a head that is tied to the table may be stored as well."""
        return isinstance(self._source, _PlainTensors)

    def numbers(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        """A weight, or a part of it, in the served type."""
        return (weight if self._dtype is None or not isinstance(weight, Tensor) else weight.to(self._dtype)).to(dtype)

    def check_all_taken(self, config: Any) -> None:
        """Raises `NotStated` where the checkpoint has more."""
        patterns = [_UNUSED, *(pattern.format(**vars(config)) for pattern in self._family.unused)]
        left = {name for name in self._source.left if not any(re.search(pattern, name) for pattern in patterns)}
        if left:
            raise NotStated(f"the checkpoint has {len(left)} more tensors, such as {min(left)}")

    def _names(self, name: str) -> list[str]:
        """Names by which a tensor may be stored: its own, those of other files, and those of the model without its
        head.
        """
        other = name
        for ours, theirs in self._family.stored_as:
            other = other.replace(ours, theirs)
        names = list(dict.fromkeys((name, other)))
        return names + [known.removeprefix(self._family.base) for known in names if known.startswith(self._family.base)]


def stored_tensors(config: ModelConfig, stated: Any, folder: Path, family: Family) -> StoredTensors:
    """Tensors by the settings: of the files, of the quantized files, or random ones.

    Raises `ConfigurationError` and `UnsupportedModelError` as `compact_tensors`.
    """
    if config.load_format == "dummy":
        return StoredTensors(_DummyTensors(config.seed, stated.dtype or torch.float32), family, None)
    compact: CompactTensors | None = compact_tensors(folder, config.quantization)
    if compact is not None:
        return StoredTensors(compact, family, None)
    return StoredTensors(_PlainTensors(folder), family, stated.dtype)


def drafting_tensors(stated: Any, folder: Path, family: Family, base: str) -> StoredTensors:
    """Tensors of the files as they are, including names that begin with `base`."""
    return StoredTensors(_PlainTensors(folder, base), family, stated.dtype)


class _PlainTensors:
    def __init__(self, folder: Path, others: str | None = None) -> None:
        mapped = mapped_tensors(folder, others)
        self._tensors: Mapping[str, Tensor] = {name: one.values for name, one in mapped.items()}
        self.left = set(self._tensors)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        if name not in self.left:
            return None
        self.left.remove(name)
        return self._tensors[name]


class _DummyTensors:
    """Random ones of any name."""

    left: Final[set[str]] = set()

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._make = DummyWeights(seed, torch.device("cpu"))
        self._dtype = dtype

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._make(name, torch.empty(shape, dtype=self._dtype, device="meta"))

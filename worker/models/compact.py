"""Compact checkpoints: those whose weights are codes in their files, of GGUF or of a quantized Hugging Face folder, or
become codes when they are loaded. Weights are looked up by the names of parameters.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from holdfast.worker.config import Quantization
from holdfast.worker.models.checkpoint_scheme import check_quantization
from holdfast.worker.models.checks import check_loaded
from holdfast.worker.models.gguf.folder import is_made_of_gguf
from holdfast.worker.models.gguf.folder_tensors import GgufTensors
from holdfast.worker.models.quantization.scheme import read_scheme
from holdfast.worker.models.quantized_tensors import QuantizedTensors
from holdfast.worker.models.quantizing_tensors import QuantizingTensors
from holdfast.worker.models.text_model import served_config
from holdfast.worker.models.weights import read_json

_EXPERTS: Final = (
    ({"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}),
    ({"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
)
"""Linears of one expert in a file, by the parameter that all experts have together in the built model."""

_OTHER_BLOCK: Final = (".mlp.", ".block_sparse_moe.")
"""Names of the MLP of Mixtral-like mixtures in the built model, and in their files."""


class Taken(Protocol):
    """Stand-in for a tensor: itself, or codes that become numbers once they are needed."""

    @property
    def shape(self) -> Sequence[int]: ...

    def to(self, dtype: torch.dtype, /) -> Tensor: ...


class CompactTensors(Protocol):
    """The tensors of a compact checkpoint. Each is taken once."""

    def take(self, name: str, shape: tuple[int, ...], /) -> Taken | None:
        """A tensor of a parameter of this shape; None: there is none of this name."""
        ...

    @property
    def left(self) -> set[str]:
        """The names of those that were not taken."""
        ...


def compact_tensors(folder: Path, quantization: Quantization | None = None) -> CompactTensors | None:
    """The tensors of the checkpoint in `folder`, or, by `quantization`, what they become; None where its files have
    weights as numbers, and these stay so.

    Raises `ConfigurationError`, also for a quantization of what is quantized, and `UnsupportedModelError` for a scheme
    that is not read.
    """
    check_quantization(folder, quantization)
    if is_made_of_gguf(folder):
        return GgufTensors(folder)
    config = served_config(read_json(folder / "config.json"), folder)
    if quantization is not None:
        return QuantizingTensors(folder, config, quantization)
    scheme = read_scheme(config)
    return None if scheme is None else QuantizedTensors(folder, scheme)


class CompactSource:
    """The source of a model whose checkpoint is compact: parameters in the dtype that is served."""

    def __init__(self, tensors: CompactTensors, model: Any, dtype: torch.dtype) -> None:
        """`model` is built without weights. What the checkpoint has of its buffers is put into them."""
        self._tensors = tensors
        self._model_type: str = model.config.model_type
        self._unexpected = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        self._dtype = dtype
        saved = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in saved and (stored := self._find(name, tuple(buffer.shape))) is not None:
                buffer.copy_(stored.to(buffer.dtype))

    def __call__(self, name: str, parameter: Tensor) -> Tensor:
        """Raises `UnsupportedModelError` for one that the checkpoint does not have, `ConfigurationError` for one of
        another form than config.json says.
        """
        shape = tuple(parameter.shape)
        stored = self._find(name, shape)
        if stored is not None:
            check_loaded(self._model_type, {name} if tuple(stored.shape) != shape else (), ())
            return stored.to(self._dtype)
        experts = self._experts(name, shape)
        if experts is None:
            check_loaded(self._model_type, {name}, ())
        assert experts is not None
        return experts

    def check_all_taken(self) -> None:
        """Raises `UnsupportedModelError` where the checkpoint has more."""
        left = {name for name in self._tensors.left if not any(re.search(one, name) for one in self._unexpected)}
        check_loaded(self._model_type, (), left)

    def _find(self, name: str, shape: tuple[int, ...]) -> Taken | None:
        for known in (name, name.replace(*_OTHER_BLOCK)):
            if (stored := self._tensors.take(known, shape)) is not None:
                return stored
        return None

    def _experts(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Linears of experts that the files have one by one, as one parameter [expert, out, in]."""
        owner, _, kind = name.rpartition(".")
        for parts in (names[kind] for names in _EXPERTS if kind in names and len(shape) == 3):
            size = shape[1] // len(parts), shape[2]
            found = self._linears(owner, parts, shape[0], size)
            first = next(found)
            if first is None:
                continue
            whole = torch.empty(shape[0] * len(parts), *size, dtype=self._dtype)
            whole[0] = first.to(self._dtype)
            for index, stored in enumerate(found, start=1):
                if stored is None:
                    check_loaded(self._model_type, {name}, ())
                    continue
                whole[index] = stored.to(self._dtype)
            return whole.view(shape)
        return None

    def _linears(
        self, owner: str, parts: Sequence[str], num_experts: int, size: tuple[int, int]
    ) -> Iterator[Taken | None]:
        for expert in range(num_experts):
            for part in parts:
                yield self._find(f"{owner}.{expert}.{part}.weight", size)

"""Compact checkpoints: their weights are codes in the files, of GGUF or of a quantized Hugging Face folder, or become
codes when they are loaded. Weights are looked up by the names of parameters, as if they were not quantized.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from holdfast.worker.config import Quantization
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models.checkpoint_scheme import check_quantization
from holdfast.worker.models.checks import check_loaded
from holdfast.worker.models.formats.gguf_folder import is_made_of_gguf
from holdfast.worker.models.formats.gguf_folder_tensors import GgufTensors
from holdfast.worker.models.formats.importers import read_weight
from holdfast.worker.models.formats.quantization_scheme import UNUSED, Layout, QuantizationScheme, read_scheme
from holdfast.worker.models.formats.quantized_weight import QuantizedWeight, TransposedExperts
from holdfast.worker.models.quantizing_tensors import QuantizingTensors
from holdfast.worker.models.safetensors_files import MappedTensor, mapped_tensors
from holdfast.worker.models.text_model import served_config
from holdfast.worker.models.weights import read_json

_FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_CODES: Final = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "scales", "qzeros")
"""Parts of a module whose weight is quantized; the first two have the codes."""
_TABLE: Final = "embed_tokens.weight"
_HEAD: Final = "lm_head.weight"


class QuantizedTensors:
    """The tensors of a checkpoint, including unquantized ones. Each is taken once."""

    def __init__(self, folder: Path, scheme: QuantizationScheme) -> None:
        """Raises `ConfigurationError` for files that cannot be read."""
        self._folder = folder
        self._scheme = scheme
        self._tensors = mapped_tensors(folder)
        self._quantized: set[str] = set()
        self._table: Tensor | None = None

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor | QuantizedWeight | TransposedExperts | None:
        """The tensor of a parameter of this shape; None: there is no tensor of this name.

        Raises `ConfigurationError`, naming tensor and file, where it is not as config.json says.
        """
        parts = _Parts(self._tensors, self._folder, name, self._scheme)
        plain = self._tensors.get(name)
        if plain is not None and plain.values.dtype in _FLOATS:
            values = parts.take_plain(name, shape)
            self._table = values if name.endswith(_TABLE) else self._table
            return values
        if not parts.are_there():
            return None
        scheme = self._scheme.of(parts.module)
        if scheme is None:
            raise parts.refuse_as_quantized()
        self._quantized.add(parts.module)
        return read_weight(parts, scheme, shape)

    @property
    def left(self) -> set[str]:
        """Names of unused tensors that matter: a bias of zeros, or a head that repeats the embedding, does not."""
        return {name for name, tensor in self._tensors.items() if not self._is_unused(name, tensor.values)}

    def _is_unused(self, name: str, values: Tensor) -> bool:
        """AutoGPTQ writes a bias for every quantized module, and the head of a tied model."""
        module, _, part = name.rpartition(".")
        if name == _HEAD and self._table is not None:
            return values.dtype == self._table.dtype and values.equal(self._table)
        return part in UNUSED or (part == "bias" and module in self._quantized and not bool(values.any()))


class _Parts:
    """The tensors of one module."""

    def __init__(self, tensors: dict[str, MappedTensor], folder: Path, name: str, scheme: QuantizationScheme) -> None:
        self._tensors = tensors
        self._folder = folder
        owner, _, kind = name.rpartition(".")
        self._is_bare = kind != "weight"
        self.module = name if self._is_bare else owner
        """Experts of one parameter are called by its name."""
        self._scheme = scheme
        self._file = self._first_file()

    def are_there(self) -> bool:
        """Whether there is anything that a quantized weight is made of."""
        if self._is_bare:
            found = self._scheme.of(self.module)
            return found is not None and found.layout is Layout.MXFP4 and (self.has("_blocks") or self.has("_scales"))
        return any(map(self.has, ("weight", *_CODES)))

    def has(self, part: str) -> bool:
        """See `formats.Parts`."""
        return self._name(part) in self._tensors

    def take(self, part: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        """See `formats.Parts`."""
        name = self._name(part)
        if name not in self._tensors:
            raise ConfigurationError(
                f"{self._file} lacks the tensor {name}, without which the weight of {self.module} cannot be read "
                f"({self._scheme.method}); fetch it again"
            )
        values = self._tensors[name].values
        if values.dtype not in dtypes:
            expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.refuse(part, f"is of type {str(values.dtype).removeprefix('torch.')}, and not {expected}")
        if tuple(values.shape) not in shapes:
            expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise self.refuse(part, f"has shape {list(values.shape)}, and not {expected}")
        return self._tensors.pop(name).values

    def take_plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that is not quantized."""
        values = self._tensors[name].values
        if tuple(values.shape) != shape:
            file = self._tensors[name].file
            raise ConfigurationError(f"{file}: the tensor {name} has shape {list(values.shape)}, and not {list(shape)}")
        if not self._is_bare and (codes := next(filter(self.has, _CODES[:2]), None)):
            raise self.refuse(codes, f"is there beside {name}, which is not quantized")
        return self._tensors.pop(name).values

    def refuse(self, part: str, reason: str) -> ConfigurationError:
        """See `formats.Parts`."""
        tensor = self._tensors.get(self._name(part))
        file = self._file if tensor is None else tensor.file
        return ConfigurationError(
            f"{file}: the tensor {self._name(part)} {reason}, as the quantization_config of config.json "
            f"({self._scheme.method}) has it; fetch both again"
        )

    def refuse_as_quantized(self) -> ConfigurationError:
        """The error of a module that is quantized and should not be."""
        part = next(filter(self.has, ("weight", *_CODES)), "_blocks")
        return self.refuse(part, "is quantized, and is not to be")

    def _name(self, part: str) -> str:
        return self.module + part if self._is_bare else f"{self.module}.{part}"

    def _first_file(self) -> str:
        """The file that has something of this module, or the folder."""
        parts = ("_blocks", "_scales") if self._is_bare else ("weight", *_CODES)
        found = next(filter(self.has, parts), None)
        return str(self._folder) if found is None else self._tensors[self._name(found)].file


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
        """Names of unused tensors."""
        ...


def compact_tensors(folder: Path, quantization: Quantization | None = None) -> CompactTensors | None:
    """The tensors of the checkpoint in `folder`, quantized if `quantization` is set; None where its files have
    weights as numbers, and these stay so.

    Raises `ConfigurationError`, also for a quantization of a quantized checkpoint, and `UnsupportedModelError` for an
    unsupported scheme.
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
        """`model` is built without weights. Buffers that the checkpoint has are filled in."""
        self._tensors = tensors
        self._model_type: str = model.config.model_type
        self._unexpected = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        self._dtype = dtype
        saved = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in saved and (stored := self._find(name, tuple(buffer.shape))) is not None:
                buffer.copy_(stored.to(buffer.dtype))

    def __call__(self, name: str, parameter: Tensor) -> Tensor:
        """Raises `UnsupportedModelError` for a tensor that the checkpoint does not have, `ConfigurationError` for one
        of another shape than config.json defines.
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

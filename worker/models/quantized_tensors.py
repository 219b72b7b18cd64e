"""Tensors of a folder with quantized weights, by the names that they would have if they were not quantized."""

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models.quantization.formats import read_weight
from holdfast.worker.models.quantization.scheme import Layout, QuantizationScheme
from holdfast.worker.models.quantization.stored_parts import UNUSED
from holdfast.worker.models.quantization.weight import QuantizedWeight, TransposedExperts
from holdfast.worker.models.safetensors_files import MappedTensor, mapped_tensors

_FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_CODES: Final = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "scales", "qzeros")
"""Parts of a module whose weight is quantized; the first two have the codes."""
_TABLE: Final = "embed_tokens.weight"
_HEAD: Final = "lm_head.weight"


class QuantizedTensors:
    """The tensors of a checkpoint, those that are not quantized among them. Each is taken once."""

    def __init__(self, folder: Path, scheme: QuantizationScheme) -> None:
        """Raises `ConfigurationError` for files that cannot be read."""
        self._folder = folder
        self._scheme = scheme
        self._tensors = mapped_tensors(folder)
        self._quantized: set[str] = set()
        self._table: Tensor | None = None

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor | QuantizedWeight | TransposedExperts | None:
        """The tensor of a parameter of this shape; None: there is none of this name.

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
        """The names of those that were not taken and are of use: a bias of zeros and a head that is the embedding once
        more are of none.
        """
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

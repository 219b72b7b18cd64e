"""Quantized folder: a plain checkpoint, quantized by the rule of loading and written in compressed-tensors. It appears
as a whole or not at all.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from holdfast.worker.config import Quantization
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.finite import NotFiniteError
from holdfast.worker.models.checkpoint_scheme import check_quantization
from holdfast.worker.models.damaged_weights import damaged
from holdfast.worker.models.formats.codes import PackedCodes
from holdfast.worker.models.formats.quantization_rule import is_head, is_table
from holdfast.worker.models.formats.quantization_scheme import WeightScheme
from holdfast.worker.models.formats.quantized_weight import QuantizedWeight
from holdfast.worker.models.quantizing_tensors import PlainExperts, PlainWeight, QuantizingTensors
from holdfast.worker.models.safetensors_header import INDEX
from holdfast.worker.models.text_model import holds_text_model
from holdfast.worker.models.weights import read_json
from holdfast.worker.progress import Report

StoredScheme = Literal["int4", "int8", "fp8", "w8a16"]

QUANTIZATION_OF: Final[Mapping[StoredScheme, Quantization]] = {
    "int4": "int4",
    "int8": "int8",
    "fp8": "fp8",
    "w8a16": "int8",
}
"""The rule by which codes are chosen."""

_FORMATS: Final[Mapping[StoredScheme, str]] = {
    "int4": "pack-quantized",
    "int8": "int-quantized",
    "fp8": "float-quantized",
    "w8a16": "pack-quantized",
}
_IS_PACKED: Final = "pack-quantized"
_LINEAR: Final = "Linear"

SHARD_BYTES: Final = 2 << 30
"""Most bytes of a file, unless one tensor has more; so much is in memory at a time."""

_WEIGHTS: Final = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx")
_PHASE: Final = "quantize"


def write_quantized(
    folder: Path, out: Path, scheme: StoredScheme, report: Report, shard_bytes: int = SHARD_BYTES
) -> int:
    """Writes the checkpoint in `folder` to a new folder `out`, with all its other files; the bytes of its weights.

    Raises `ConfigurationError` where `out` is there, cannot be written to, or the checkpoint cannot be quantized, and
    `UnsupportedModelError`, by name, for a weight with numbers that are NaN or infinite.
    """
    if out.exists() or out.is_symlink():
        raise ConfigurationError(f"OUT = {str(out)!r}: it is there already; name a folder that is not")
    quantization = QUANTIZATION_OF[scheme]
    check_quantization(folder, quantization)
    config = read_json(folder / "config.json")
    if holds_text_model(config):
        raise ConfigurationError(f"IN = {str(folder)!r}: it holds several models; quantize a text model that is alone")
    tensors = QuantizingTensors(folder, config, quantization)
    if (name := tensors.of_several_experts) is not None:
        reason = f"{name} has the weights of several experts, and compressed-tensors has each by itself"
        raise ConfigurationError(f"IN = {str(folder)!r}: {reason}; serve it with --quantization {quantization}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
            made = Path(temporary, "made")
            made.mkdir()
            _copy_others(folder, made)
            writer = _Writer(made, scheme, shard_bytes)
            for name, taken in _taken(tensors, report):
                writer.add(name, taken)
            num_bytes = writer.close(config)
            made.rename(out)
    except NotFiniteError as found:
        raise damaged(folder, found) from None
    except OSError as error:
        raise ConfigurationError(f"OUT = {str(out)!r}: it cannot be written ({error.strerror or error})") from error
    return num_bytes


def _taken(tensors: QuantizingTensors, report: Report) -> Iterator[tuple[str, Tensor | PlainWeight]]:
    names = tensors.names
    for done, name in enumerate(names, start=1):
        taken = tensors.take(name, ())
        assert not isinstance(taken, PlainExperts), "they are refused before"
        if taken is not None:
            yield name, taken
        report(_PHASE, done, len(names))


def _copy_others(folder: Path, made: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHTS and path.name not in ("config.json", INDEX):
            shutil.copyfile(path, made / path.name)


@dataclass
class _Writer:
    """Writes tensors to files, one after the other."""

    folder: Path
    scheme: StoredScheme
    shard_bytes: int
    schemes: dict[str, WeightScheme] = field(default_factory=dict)
    """Quantized modules."""
    plain: list[str] = field(default_factory=list)
    """Modules with matrices that are not, tables aside."""
    _held: dict[str, Tensor] = field(default_factory=dict)
    _files: list[list[str]] = field(default_factory=list)
    _num_bytes: int = 0

    def add(self, name: str, taken: Tensor | PlainWeight) -> None:
        module = name.removesuffix(".weight")
        if isinstance(taken, PlainWeight):
            self.schemes[module] = taken.scheme
            parts = stored_tensors(taken.quantized(), self.scheme)
            self._hold({f"{module}.{part}": values for part, values in parts.items()})
            return
        if name.endswith(".weight") and taken.dim() == 2 and not is_table(name):
            self.plain.append(module)
        self._hold({name: taken})

    def _hold(self, tensors: Mapping[str, Tensor]) -> None:
        size = sum(values.nbytes for values in tensors.values())
        if self._held and sum(values.nbytes for values in self._held.values()) + size > self.shard_bytes:
            self._write()
        self._held |= tensors

    def _write(self) -> None:
        self._num_bytes += sum(values.nbytes for values in self._held.values())
        contents = {name: values.contiguous() for name, values in self._held.items()}
        save_file(contents, self.folder / f"{len(self._files)}.part", {"format": "pt"})
        self._files.append(list(self._held))
        self._held = {}

    def close(self, config: Mapping[str, Any]) -> int:
        """Names the files, and writes config.json; the bytes of all tensors."""
        self._write()
        count = len(self._files)
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        names = ["model.safetensors"] if count == 1 else names
        if count > 1:
            places = {tensor: name for name, own in zip(names, self._files, strict=True) for tensor in own}
            _write_json(self.folder / INDEX, {"metadata": {"total_size": self._num_bytes}, "weight_map": places})
        heads = [module for module in self.schemes if is_head(f"{module}.weight")]
        said = quantization_config(self.scheme, self.schemes, self.plain, heads)
        _write_json(self.folder / "config.json", {**config, "tie_word_embeddings": False, "quantization_config": said})
        for number, name in enumerate(names):
            part = self.folder / f"{number}.part"
            part.chmod((self.folder / "config.json").stat().st_mode)  # safetensors lets the owner alone read it
            part.rename(self.folder / name)
        return self._num_bytes


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# --- as compressed-tensors stores it: tensors and groups that vLLM reads as well ---


def stored_tensors(weight: QuantizedWeight, scheme: StoredScheme) -> dict[str, Tensor]:
    """The tensors of a whole quantized weight, by the last parts of their names."""
    scales = {"weight_scale": weight.scales}
    if _FORMATS[scheme] != _IS_PACKED:
        return {"weight": weight.codes.stored, **scales}
    words = weight.codes.stored if isinstance(weight.codes, PackedCodes) else _words(weight.codes.stored)
    return {"weight_packed": words, **scales, "weight_shape": torch.tensor(weight.shape)}


def _words(codes: Tensor) -> Tensor:
    """Words of int8 codes [out, in], int32 [out, in / 4]: the codes plus 128, the first in the lowest bits."""
    unsigned = torch.nn.functional.pad(codes.view(torch.uint8) ^ 128, (0, -codes.shape[1] % 4))
    return unsigned.view(torch.int32)


def quantization_config(
    scheme: StoredScheme, schemes: Mapping[str, WeightScheme], plain: Sequence[str], heads: Iterable[str]
) -> dict[str, Any]:
    """The `quantization_config` of a model: `schemes` by the names of quantized modules, `plain` the unquantized ones.
    Heads are targets by their names: vLLM does not take them for linears.
    """
    kinds = list(dict.fromkeys(schemes.values()))
    kinds.sort(key=lambda kind: kind.bits)  # that of most linears first
    groups = {}
    for number, kind in enumerate(kinds):
        named = [module for module, own in schemes.items() if own is kind and (number > 0 or module in heads)]
        targets = [*([_LINEAR] if number == 0 else []), *named]
        groups[f"group_{number}"] = {
            "targets": targets,
            "weights": _weights(kind),
            "input_activations": None if _FORMATS[scheme] == _IS_PACKED else _activations(kind),
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[scheme],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": list(plain),
        "config_groups": groups,
    }


def _weights(kind: WeightScheme) -> dict[str, Any]:
    _, group = kind.block
    return {
        "num_bits": kind.bits,
        "type": "float" if kind.is_float else "int",
        "symmetric": True,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
        "observer": "mse" if kind.bits == 4 else "minmax",
    }


def _activations(kind: WeightScheme) -> dict[str, Any]:
    """Entry for activations of 8 bits, whose scale a runtime finds for each token."""
    return {
        "num_bits": 8,
        "type": "float" if kind.is_float else "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }

"""Quantized folder: a plain checkpoint, quantized by the rule of loading and written in compressed-tensors. It appears
as a whole or not at all.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save_file
from torch import Tensor

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models.checkpoint_scheme import check_quantization
from holdfast.worker.models.quantization.rule import is_head, is_table
from holdfast.worker.models.quantization.scheme import WeightScheme
from holdfast.worker.models.quantization.stored_form import (
    QUANTIZATION_OF,
    StoredScheme,
    quantization_config,
    stored_tensors,
)
from holdfast.worker.models.quantizing_tensors import PlainWeight, QuantizingTensors
from holdfast.worker.models.safetensors_header import INDEX
from holdfast.worker.models.text_model import holds_text_model
from holdfast.worker.models.weights import read_json
from holdfast.worker.progress import Report

SHARD_BYTES: Final = 2 << 30
"""Most bytes of a file, unless one tensor has more; so much is in memory at a time."""

_WEIGHTS: Final = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx")
_PHASE: Final = "quantize"


def write_quantized(
    folder: Path, out: Path, scheme: StoredScheme, report: Report, shard_bytes: int = SHARD_BYTES
) -> int:
    """Writes the checkpoint in `folder` to a new folder `out`, with all its other files; the bytes of its weights.

    Raises `ConfigurationError` where `out` is there, cannot be written to, or the checkpoint cannot be quantized.
    """
    if out.exists() or out.is_symlink():
        raise ConfigurationError(f"OUT = {str(out)!r}: it is there already; name a folder that is not")
    quantization = QUANTIZATION_OF[scheme]
    check_quantization(folder, quantization)
    config = read_json(folder / "config.json")
    if holds_text_model(config):
        raise ConfigurationError(f"IN = {str(folder)!r}: it holds several models; quantize a text model that is alone")
    tensors = QuantizingTensors(folder, config, quantization)
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
    except OSError as error:
        raise ConfigurationError(f"OUT = {str(out)!r}: it cannot be written ({error.strerror or error})") from error
    return num_bytes


def _taken(tensors: QuantizingTensors, report: Report) -> Iterator[tuple[str, Tensor | PlainWeight]]:
    names = tensors.names
    for done, name in enumerate(names, start=1):
        taken = tensors.take(name, ())
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

"""Kept layout of a checkpoint that Hugging Face's modules were built for: where layout files lie, and when one may be
used again. It may if nothing has changed that it was made of: the checkpoint's files, the settings, this code, the
libraries.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from holdfast.worker.config import WorkerConfig
from holdfast.worker.distributed.tensor_parallel import TensorParallelGroup
from holdfast.worker.executors import layout as parts
from holdfast.worker.executors.mapped_files import MappedFiles, storage_of_file, tensor_in_file
from holdfast.worker.models.model_facts import ModelFacts
from holdfast.worker.models.proof import Answer, Answers, LayerAnswer, Recognized
from holdfast.worker.models.weight_files import checkpoint_digest, weight_files
from holdfast.worker.user_folder import user_folder

logger = logging.getLogger(__name__)

_MOST_FILES: Final = 64
"""The oldest go when there are more."""

_SETTINGS: Final = ("dtype", "max_model_len", "load_format", "executor", "hf_overrides", "quantization")
"""Of the model, that a layout or its facts depend on."""

_SOURCES: Final = ("executors", "models")
"""The rooms that make a layout."""


class KeptLayout:
    """The place of one rank's layout file."""

    def __init__(self, config: WorkerConfig, folder: Path, group: TensorParallelGroup, device: torch.device) -> None:
        self._folder = folder
        self._path: Path | None = None
        model = config.model
        if model.keep_layout and device.type == "cpu" and model.load_format != "dummy" and model.executor != "hf":
            settings = [getattr(model, name) for name in _SETTINGS]
            share = f"{group.rank}-of-{group.size}"
            self._path = layouts_folder() / f"{_digest(folder, settings, config.cache.block_size)}-{share}"

    def recall(self) -> tuple[Recognized, ModelFacts] | None:
        """What an earlier start has kept, if it can still be used."""
        if self._path is None or not self._path.is_file():
            return None
        try:
            kept = load(self._path, self._folder)
            facts = ModelFacts(**{**kept.facts, "eos_token_ids": tuple(kept.facts["eos_token_ids"])})
        except (ValueError, OSError, TypeError, KeyError) as error:
            logger.info("the layout that was kept is made again: %s", error)
            return None
        return kept.recognized, facts

    def keep(self, recognized: Recognized, facts: ModelFacts) -> None:
        """For later starts, where there is a place to write to."""
        if self._path is None:
            return
        try:
            if save(self._path, recognized, self._folder, asdict(facts)):
                _drop_oldest(self._path.parent)
        except OSError as error:
            logger.info("the layout is not kept: %s", error)

    def forget(self) -> None:
        """An executor does not compute it: another start would find out the same."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()


def layouts_folder() -> Path:
    """The user's layout files."""
    return user_folder() / "layouts"


def _digest(folder: Path, *settings: object) -> str:
    """Names all that a layout is made of."""
    digest = blake2b(repr(settings).encode(), digest_size=12)
    digest.update(f"{torch.__version__} {version('transformers')} {checkpoint_digest(folder)}".encode())
    for path in sorted({*folder.glob("*.json"), *folder.glob("*.safetensors"), *weight_files(folder)}):
        found = path.stat()
        digest.update(f"{path.name} {found.st_size} {found.st_mtime_ns} {found.st_ino}".encode())
    rooms = Path(__file__).parent.parent
    for path in sorted(path for room in _SOURCES for path in (rooms / room).rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _drop_oldest(folder: Path) -> None:
    paths = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for path in paths[:-_MOST_FILES]:
        path.unlink(missing_ok=True)


MOST_OWN_BYTES: Final = 64 << 20
"""A layout file with more tensors of its own is not written: the checkpoint has its weights in another form."""

_PARTS: Final = [kind for kind in vars(parts).values() if isinstance(kind, type) and is_dataclass(kind)]
_KINDS: Final[Mapping[str, Callable[..., Any]]] = {
    **{kind.__name__: kind for kind in _PARTS},
    **{kind.__name__: kind for kind in (Answer, Answers, LayerAnswer, Recognized)},
    parts.Activation.__name__: parts.Activation,
}
_KEY: Final = "recognized"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """What a layout file holds."""

    recognized: Recognized
    facts: Mapping[str, Any]
    """Plain values that were kept with it."""


def save(path: Path, recognized: Recognized, folder: Path, facts: Mapping[str, Any]) -> bool:
    """Writes a layout file for the checkpoint in `folder`; it appears as a whole. False: it would be too large."""
    writer = _Writer(folder)
    written = writer.write(recognized)
    if sum(tensor.nbytes for tensor in writer.own.values()) > MOST_OWN_BYTES:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    save_file(writer.own, part, {_KEY: json.dumps({"parts": written, "facts": dict(facts)})})
    part.rename(path)
    return True


def load(path: Path, folder: Path) -> KeptModel:
    """Reads a layout file; its weights are views of the mapped checkpoint. Raises ValueError."""
    try:
        with safe_open(path, framework="pt") as file:
            content = json.loads(file.metadata()[_KEY])
            recognized = _Reader(folder, file).read(content["parts"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a layout file of this version: {error}") from error
    except Exception as error:  # safetensors raises a class of its own, which is no ValueError
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(recognized, Recognized):
        raise ValueError(f"{path} holds a {type(recognized).__name__}")
    return KeptModel(recognized=recognized, facts=content["facts"])


class _Writer:
    def __init__(self, folder: Path) -> None:
        self._names = {str(path.resolve()): path.name for path in folder.glob("*.safetensors")}
        self._files = MappedFiles()
        self._numbers: dict[tuple[object, ...], str] = {}
        self.own: dict[str, Tensor] = {}
        """What lies in no file, by number."""

    def write(self, part: Any) -> Any:
        if isinstance(part, Tensor):
            return {"tensor": self._tensor(part)}
        if isinstance(part, torch.dtype):
            return {"dtype": str(part).removeprefix("torch.")}
        if isinstance(part, tuple):
            return [self.write(item) for item in part]
        if isinstance(part, Enum):
            return {type(part).__name__: part.value}
        if is_dataclass(part):
            return {type(part).__name__: {item.name: self.write(getattr(part, item.name)) for item in fields(part)}}
        assert part is None or isinstance(part, bool | int | float | str), f"a {type(part).__name__} in a layout"
        return part

    def _tensor(self, tensor: Tensor) -> Any:
        place = self._files.place_of(tensor)
        if place is not None and place.path in self._names:
            dtype = str(tensor.dtype).removeprefix("torch.")
            return [self._names[place.path], place.offset, dtype, list(tensor.shape), list(tensor.stride())]
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if key not in self._numbers:
            self._numbers[key] = str(len(self._numbers))
            self.own[self._numbers[key]] = tensor.detach().clone(memory_format=torch.contiguous_format)
        return self._numbers[key]


class _Reader:
    def __init__(self, folder: Path, file: Any) -> None:
        self._folder = folder
        self._file = file
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._own: dict[str, Tensor] = {}

    def read(self, written: Any) -> Any:
        if isinstance(written, list):
            return tuple(self.read(item) for item in written)
        if not isinstance(written, dict):
            return written
        ((name, content),) = written.items()
        if name == "tensor":
            return self._tensor(content)
        if name == "dtype":
            return _dtype(content)
        kind = _KINDS[name]
        return (
            kind(**{key: self.read(value) for key, value in content.items()}) if is_dataclass(kind) else kind(content)
        )

    def _tensor(self, place: Any) -> Tensor:
        if isinstance(place, str):
            if place not in self._own:
                self._own[place] = self._file.get_tensor(place)
            return self._own[place]
        name, offset, dtype, shape, strides = place
        if name not in self._storages:
            self._storages[name] = storage_of_file(self._folder / name)
        return tensor_in_file(self._storages[name], _dtype(dtype), offset, tuple(shape), tuple(strides))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return dtype

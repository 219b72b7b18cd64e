"""Kept layout of a checkpoint that Hugging Face's modules were built for: where layout files lie, and when one may be
used again. It may if nothing has changed that it was made of: the checkpoint's files, the settings, this code, the
libraries.
"""

import logging
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch

from holdfast.worker.config import WorkerConfig
from holdfast.worker.distributed.tensor_parallel import TensorParallelGroup
from holdfast.worker.models.layout_file import load, save
from holdfast.worker.models.model_facts import ModelFacts
from holdfast.worker.models.proof import Recognized
from holdfast.worker.models.weight_files import checkpoint_digest
from holdfast.worker.user_folder import user_folder

logger = logging.getLogger(__name__)

_MOST_FILES: Final = 64
"""The oldest go when there are more."""

_SETTINGS: Final = ("dtype", "max_model_len", "load_format", "executor", "hf_overrides")
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
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
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

"""Where the bundled models lie: ordinary Hugging Face folders, shipped as package data."""

from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Final

from holdfast.worker.errors import UnknownModelError

_FOLDERS: Final = MappingProxyType({"demo": "model", "demo-draft": "draft"})


def bundled_path(name: str) -> Path:
    """The folder of `demo` or of its draft model `demo-draft`. Raises `UnknownModelError` for any other name."""
    if name not in _FOLDERS:
        raise UnknownModelError(name, tuple(_FOLDERS))
    return Path(str(files("holdfast.cluster.bundled_model"))) / _FOLDERS[name]

"""Bundled models: ordinary Hugging Face folders, shipped as package data, and the names they have in settings.

The packages below see folders and hub ids only.
"""

from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Final

from holdfast.worker.config import WorkerConfig
from holdfast.worker.errors import UnknownModelError

BUNDLED: Final = "demo"
BUNDLED_DRAFT: Final = "demo-draft"
_FOLDERS: Final = MappingProxyType({BUNDLED: "model", BUNDLED_DRAFT: "draft"})


def bundled_path(name: str) -> Path:
    """The folder of `demo` or of its draft model `demo-draft`. Raises `UnknownModelError` for any other name."""
    if name not in _FOLDERS:
        raise UnknownModelError(name, tuple(_FOLDERS))
    return Path(str(files("holdfast.cluster.bundled_model"))) / _FOLDERS[name]


def located(config: WorkerConfig) -> WorkerConfig:
    """`config` as it is; for the bundled model, with the folder where it lies on this machine, under its own name.

    The bundled draft model is found in the same way, and is the bundled model's where the settings name none.
    """
    draft = config.speculation.draft_model or (BUNDLED_DRAFT if config.model.model == BUNDLED else None)
    if draft == BUNDLED_DRAFT:
        speculation = config.speculation.model_copy(update={"draft_model": str(bundled_path(BUNDLED_DRAFT))})
        config = config.model_copy(update={"speculation": speculation})
    if config.model.model != BUNDLED:
        return config
    name = config.model.served_model_name or BUNDLED
    model = config.model.model_copy(update={"model": str(bundled_path(BUNDLED)), "served_model_name": name})
    return config.model_copy(update={"model": model})

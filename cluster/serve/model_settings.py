"""Settings of a model that runs: what its replicas were started with, and an update's settings over them."""

import json
from collections.abc import Mapping
from typing import Any

from holdfast.cluster.config.config import HoldfastConfig, LoadedConfig, is_given
from holdfast.cluster.serve import models
from holdfast.worker.errors import UnknownModelError


def running_settings(namespace: str, name: str) -> Mapping[str, Any]:
    """The settings of a replica that serves the model, as nested mappings. Raises `UnknownModelError`."""
    found = models.settings_of(namespace)
    if name not in found:
        raise UnknownModelError(name, tuple(found))
    settings: Mapping[str, Any] = json.loads(found[name])
    return settings


def over_running(running: Mapping[str, Any], loaded: LoadedConfig) -> HoldfastConfig:
    """The running settings, with those of `loaded` that are given instead."""
    tree = loaded.config.model_dump()
    for section, values in running.items():
        given = {key: value for key, value in tree[section].items() if is_given(loaded, f"{section}.{key}")}
        tree[section] = {**tree[section], **values, **given}
    return HoldfastConfig.model_validate(tree)

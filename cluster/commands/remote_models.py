"""Models of a cluster on another machine: a router there makes the change, and its progress is shown here."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from holdfast.cluster.config.layers import Layer
from holdfast.cluster.progress_bars import progress
from holdfast.worker.errors import ConfigurationError, ReplicaError

if TYPE_CHECKING:
    from holdfast.cluster.config.config import HoldfastConfig, LoadedConfig

SERVER_HELP: Final = (
    "host:port of a running router, on any machine; unset: the cluster of this machine, or of --address"
)

_OF_CONNECTIONS: Final = ("cluster.address", "cluster.namespace")
"""Settings that say which Ray to connect to."""


def check_remote(settings: Layer, **unusable: object) -> None:
    """Refuses flags that mean this machine together with `--server`. `unusable` are options by name, None if not given.

    Raises `ConfigurationError`.
    """
    flags = [settings[path].source for path in _OF_CONNECTIONS if path in settings]
    flags += [f"--{name.replace('_', '-')}" for name, value in unusable.items() if value is not None]
    if flags:
        raise ConfigurationError(f"{', '.join(flags)} (with --server): the router at --server is part of one cluster")


def given_settings(loaded: "LoadedConfig", sections: Iterable[str]) -> str:
    """The settings of these sections that come from a file, a variable or a flag, as nested JSON for a router.

    A chat template's file is read here.
    """
    from holdfast.cluster.config.chat_templates import with_template_texts
    from holdfast.cluster.config.config import is_given

    return settings_text(with_template_texts(loaded.config), sections, lambda path: is_given(loaded, path))


def settings_text(
    config: "HoldfastConfig", sections: Iterable[str], is_sent: Callable[[str], bool] = lambda _: True
) -> str:
    """The settings of these sections that `is_sent` chooses by their paths, as nested JSON for a router."""
    tree: Mapping[str, Mapping[str, Any]] = config.model_dump(mode="json")
    chosen = {
        section: {
            name: value
            for name, value in tree[section].items()
            if is_sent(f"{section}.{name}") and (section, name) != ("cluster", "models")
        }
        for section in sections
    }
    return json.dumps({section: values for section, values in chosen.items() if values})


def change_model(server: str, loaded: "LoadedConfig", **change: Mapping[str, object]) -> Any:
    """Has the router at `server` make a change (`add={"settings": ...}`), and shows its progress.

    Returns a `holdfast.v1.ModelChangeResult`. Raises `HoldfastError`.
    """
    from holdfast.cluster.client.transport import stream_admin

    events = stream_admin(server, "ChangeModel", change, **loaded.config.client.options)
    with progress(sys.stderr) as report:
        for event in events:
            if event.HasField("result"):
                return event.result
            report(event.progress.phase, event.progress.done, event.progress.total)
    raise ReplicaError(
        f"the router at {server} ended the call before the change was complete: run `holdfast models list`"
    )


def list_models(server: str, loaded: "LoadedConfig") -> Any:
    """Messages `holdfast.v1.ClusterModel`. Raises `HoldfastError`."""
    from holdfast.cluster.client.transport import call_admin

    return call_admin(server, "ListClusterModels", {}, **loaded.config.client.options).models

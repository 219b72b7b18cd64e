"""Commands `holdfast models add`, `remove` and `list`: the models of a running cluster, here or on another machine."""

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from holdfast.cluster.commands.remote_models import (
    SERVER_HELP,
    change_model,
    check_remote,
    given_settings,
    list_models,
)
from holdfast.cluster.config.flags import ESSENTIALS, takes_settings
from holdfast.cluster.config.layers import Layer, Setting
from holdfast.cluster.progress_bars import progress

if TYPE_CHECKING:
    from holdfast.cluster.config.config import HoldfastConfig, LoadedConfig


Pid = Annotated[
    int | None, Parameter(help="process id of `holdfast serve`, where this machine runs several clusters of one name")
]
Server = Annotated[str | None, Parameter(help=SERVER_HELP)]

OF_REPLICA = ("model", "parallel", "cache", "scheduler", "health", "speculation", "scaling")
OF_ROUTERS = (
    "host",
    "port",
    "http_port",
    "admin_port",
    "routers",
    "router_resources",
    "router_labels",
    "object_store_memory",
    "models",
)
OF_REPLICAS = ("replicas", "cpus_per_rank", "rank_resources", "rank_labels", "span_nodes", "domain_label")
NOT_WHICH = tuple(f"cluster.{name}" for name in (*OF_ROUTERS, *OF_REPLICAS))


@takes_settings(*OF_REPLICA, "cluster", "client", without=("model.model", *(f"cluster.{name}" for name in OF_ROUTERS)))
def add(
    model: Annotated[str, Parameter(help="a Hugging Face folder, a GGUF file, a hub id, `smollm2` or `demo`")],
    /,
    *,
    server: Server = None,
    pid: Pid = None,
    config: Annotated[Path | None, Parameter(group=ESSENTIALS, help="a .yaml or .toml file of settings")] = None,
    settings: Layer,
) -> int:
    """Add a model to a running cluster, and wait until its replicas serve."""
    from holdfast.cluster.config.config import load_config

    loaded = load_config({**settings, "model.model": Setting(model, "MODEL")}, config)
    if server is not None:
        check_remote(settings, pid=pid)
        added = change_model(server, loaded, add={"settings": given_settings(loaded, (*OF_REPLICA, "cluster"))})
        return _say_added(added.model, added.num_replicas)
    with connected(loaded.config, pid), progress(sys.stderr) as report:
        from holdfast.cluster.serve.serving import add_model

        num_replicas = add_model(loaded.config, report)
    return _say_added(loaded.config.model.name, num_replicas)


def _say_added(name: str, num_replicas: int) -> int:
    print(f"{name} is served by {num_replicas} replica{'s' if num_replicas > 1 else ''}")
    return 0


@takes_settings("cluster", "client", without=NOT_WHICH)
def remove(
    name: Annotated[str, Parameter(help="the model's name in the API")],
    /,
    *,
    server: Server = None,
    pid: Pid = None,
    settings: Layer,
) -> int:
    """Remove a model from a running cluster, and wait until its replicas have ended."""
    from holdfast.cluster.config.config import load_config

    loaded = load_config(settings)
    if server is not None:
        check_remote(settings, pid=pid)
        change_model(server, loaded, remove={"model": name, **given_drain(loaded)})
    else:
        with connected(loaded.config, pid):
            from holdfast.cluster.serve import models

            models.remove(loaded.config.cluster.namespace, name, loaded.config.cluster.drain_timeout_s)
    print(f"{name} is not served any more")
    return 0


def given_drain(loaded: "LoadedConfig") -> dict[str, object]:
    """The drain timeout for a router, if one is given: else it has its own."""
    from holdfast.cluster.config.config import is_given

    path = "cluster.drain_timeout_s"
    return {"drain_timeout_seconds": loaded.config.cluster.drain_timeout_s} if is_given(loaded, path) else {}


@takes_settings("cluster", "client", without=(*NOT_WHICH, "cluster.drain_timeout_s"))
def show(*, server: Server = None, pid: Pid = None, settings: Layer) -> int:
    """List the models of a running cluster."""
    from holdfast.cluster.config.config import load_config

    loaded = load_config(settings)
    if server is not None:
        check_remote(settings, pid=pid)
        _print_models(list_models(server, loaded))
        return 0
    with connected(loaded.config, pid):
        from holdfast.cluster.serve import models

        _print_models(models.list_models(loaded.config.cluster.namespace))
    return 0


def _print_models(models: Iterable[Any]) -> None:
    """Prints `ClusterModel` objects, or messages of that name, which have the same fields."""
    for model in models:
        engines = f"engines={','.join(model.engines)}" if model.engines else ""
        versions = ",".join(f"{version}:{number}" for version, number in sorted(model.versions.items()))
        shown = f"version={next(iter(model.versions), '')}" if len(model.versions) == 1 else f"versions={versions}"
        disks = f"on full disks={model.num_on_full_disks}" if model.num_on_full_disks else ""
        row = model.name, model.status.lower(), f"replicas={model.num_replicas}", shown, engines, disks, model.activity
        print("  ".join(filter(None, row)))


@contextmanager
def connected(config: "HoldfastConfig", pid: int | None) -> Iterator[None]:
    """A connection to the Ray of the cluster."""
    from holdfast.cluster.serve.local import running_ray

    with running_ray(config.cluster, pid):
        from ray import serve

        logging.getLogger(serve.__name__).setLevel(logging.ERROR)  # importing it has set another level
        yield

"""Commands `holdfast models add`, `remove` and `list`: the models of a running cluster."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from holdfast.cluster.config.flags import ESSENTIALS, takes_settings
from holdfast.cluster.config.layers import Layer, Setting
from holdfast.cluster.progress_bars import progress

if TYPE_CHECKING:
    from holdfast.cluster.config.config import HoldfastConfig


Pid = Annotated[int | None, Parameter(help="the process of `holdfast serve`, where several clusters run here")]

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


@takes_settings(*OF_REPLICA, "cluster", without=("model.model", *(f"cluster.{name}" for name in OF_ROUTERS)))
def add(
    model: Annotated[str, Parameter(help="a Hugging Face folder, a hub id, or `demo`")],
    /,
    *,
    pid: Pid = None,
    config: Annotated[Path | None, Parameter(group=ESSENTIALS, help="a .yaml or .toml file of settings")] = None,
    settings: Layer,
) -> int:
    """Add a model to a running cluster, and wait until its replicas serve.

    The cluster is that of `holdfast serve` on this machine, or the one on the Ray at --address.
    """
    from holdfast.cluster.config.config import load_config

    loaded = load_config({**settings, "model.model": Setting(model, "MODEL")}, config).config
    with connected(loaded, pid), progress(sys.stderr) as report:
        from holdfast.cluster.serve.serving import add_model

        num_replicas = add_model(loaded, report)
    print(f"{loaded.model.name} is served by {num_replicas} replica{'s' if num_replicas > 1 else ''}")
    return 0


@takes_settings("cluster", without=NOT_WHICH)
def remove(
    name: Annotated[str, Parameter(help="the model's name in the API")], /, *, pid: Pid = None, settings: Layer
) -> int:
    """Take a model away from a running cluster, and wait until its replicas have ended.

    New requests for it are refused at once; those that run may finish within the time that it was started with
    (drain_timeout_s).
    """
    from holdfast.cluster.config.config import load_config

    loaded = load_config(settings).config
    with connected(loaded, pid):
        from holdfast.cluster.serve import models

        models.remove(loaded.cluster.namespace, name, loaded.cluster.drain_timeout_s)
    print(f"{name} is not served any more")
    return 0


@takes_settings("cluster", without=(*NOT_WHICH, "cluster.drain_timeout_s"))
def show(*, pid: Pid = None, settings: Layer) -> int:
    """List the models of a running cluster: each one's state, replicas that serve, and what the others are doing."""
    from holdfast.cluster.config.config import load_config

    loaded = load_config(settings).config
    with connected(loaded, pid):
        from holdfast.cluster.serve import models

        for model in models.list_models(loaded.cluster.namespace):
            engines = f"engines={','.join(model.engines)}" if model.engines else ""
            versions = ",".join(f"{version}:{number}" for version, number in sorted(model.versions.items()))
            shown = f"version={next(iter(model.versions), '')}" if len(model.versions) == 1 else f"versions={versions}"
            disks = f"on full disks={model.num_on_full_disks}" if model.num_on_full_disks else ""
            row = model.name, model.status.lower(), f"replicas={model.num_replicas}", shown, engines, disks, model.doing
            print("  ".join(filter(None, row)))
    return 0


@contextmanager
def connected(config: "HoldfastConfig", pid: int | None) -> Iterator[None]:
    """A connection to the Ray of the cluster."""
    from holdfast.cluster.serve.local import running_ray

    with running_ray(config.cluster, pid):
        from ray import serve

        logging.getLogger(serve.__name__).setLevel(logging.ERROR)  # importing it has set another level
        yield

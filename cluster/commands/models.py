"""Commands `holdfast models`: list, add, update, roll back and remove models of a cluster, local or at `--server`."""

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from holdfast.cluster.config.flags import ESSENTIALS, takes_settings
from holdfast.cluster.config.layers import Layer, Setting
from holdfast.cluster.progress_bars import progress
from holdfast.worker.errors import ConfigurationError, ReplicaError

if TYPE_CHECKING:
    from holdfast.cluster.config.config import HoldfastConfig, LoadedConfig


# --- on another machine ---

SERVER_HELP: Final = (
    "host:port of a running router, on any machine; unset: the cluster on this machine, or on the Ray at --address"
)

_OF_CONNECTIONS: Final = ("cluster.address", "cluster.namespace")
"""Settings that say which Ray to connect to."""


def check_remote(settings: Layer, **unusable: object) -> None:
    """Refuses `--server` together with flags that concern this machine. `unusable`: options by name, None if not given.

    Raises `ConfigurationError`.
    """
    flags = [settings[path].source for path in _OF_CONNECTIONS if path in settings]
    flags += [f"--{name.replace('_', '-')}" for name, value in unusable.items() if value is not None]
    if flags:
        raise ConfigurationError(f"{', '.join(flags)} (with --server): the router at --server is part of one cluster")


def given_settings(loaded: "LoadedConfig", sections: Iterable[str]) -> str:
    """Settings of these sections that a file, a variable or a flag sets, as nested JSON for a router.

    The path of a chat template is replaced by the file's text.
    """
    from holdfast.cluster.config.chat_templates import with_template_texts
    from holdfast.cluster.config.config import is_given

    return settings_text(with_template_texts(loaded.config), sections, lambda path: is_given(loaded, path))


def settings_text(
    config: "HoldfastConfig", sections: Iterable[str], is_sent: Callable[[str], bool] = lambda _: True
) -> str:
    """Settings of these sections whose paths `is_sent` accepts, as nested JSON for a router."""
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
    """Sends a change (`add={"settings": ...}`) to the router at `server`, and shows its progress.

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


Pid = Annotated[
    int | None, Parameter(help="process id of `holdfast serve`, where this machine runs several clusters of one name")
]
Server = Annotated[str | None, Parameter(help=SERVER_HELP)]

MODEL_SECTIONS = ("model", "parallel", "cache", "scheduler", "health", "speculation", "scaling")
ROUTER_SETTINGS = (
    "host",
    "port",
    "http_port",
    "admin_port",
    "routers",
    "router_resources",
    "router_labels",
    "object_store_memory",
    "models",
    "http_front_port",
)
REPLICA_SETTINGS = (
    "replicas",
    "cpus_per_rank",
    "rank_resources",
    "rank_labels",
    "span_nodes",
    "domain_label",
    "engine_port",
    "metrics_port",
)
LAYOUT_SETTINGS = tuple(f"cluster.{name}" for name in (*ROUTER_SETTINGS, *REPLICA_SETTINGS))
"""Settings of `cluster` that lay out routers and replicas; the others choose a cluster and drain it."""


@takes_settings(
    *MODEL_SECTIONS, "cluster", "client", without=("model.model", *(f"cluster.{name}" for name in ROUTER_SETTINGS))
)
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
        added = change_model(server, loaded, add={"settings": given_settings(loaded, (*MODEL_SECTIONS, "cluster"))})
        return _say_added(added.model, added.num_replicas)
    with connected(loaded.config, pid), progress(sys.stderr) as report:
        from holdfast.cluster.serve.serving import add_model

        num_replicas = add_model(loaded.config, report)
    return _say_added(loaded.config.model.name, num_replicas)


def _say_added(name: str, num_replicas: int) -> int:
    print(f"{name} is served by {num_replicas} replica{'s' if num_replicas > 1 else ''}")
    return 0


@takes_settings("cluster", "client", without=LAYOUT_SETTINGS)
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
    print(f"{name} is no longer served")
    return 0


def given_drain(loaded: "LoadedConfig") -> dict[str, object]:
    """The drain timeout for a router, if one is given: else it has its own."""
    from holdfast.cluster.config.config import is_given

    path = "cluster.drain_timeout_s"
    return {"drain_timeout_seconds": loaded.config.cluster.drain_timeout_s} if is_given(loaded, path) else {}


@takes_settings("cluster", "client", without=(*LAYOUT_SETTINGS, "cluster.drain_timeout_s"))
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
        for adapter, digest in sorted(model.adapters.items()):
            pinned = "  pinned" if adapter in model.pinned_adapters else ""
            print(f"{adapter}  adapter of {model.name}  digest={digest}{pinned}")


@contextmanager
def connected(config: "HoldfastConfig", pid: int | None) -> Iterator[None]:
    """A connection to the Ray of the cluster."""
    from holdfast.cluster.serve.local import running_ray

    with running_ray(config.cluster, pid):
        from ray import serve

        logging.getLogger(serve.__name__).setLevel(logging.ERROR)  # importing it has set another level
        yield


# --- other versions ---


_CANARY = "share of new requests that a canary gets, in (0, 1]; default: no canary"


@takes_settings(
    *MODEL_SECTIONS,
    "cluster",
    "client",
    without=("model.served_model_name", *(f"cluster.{name}" for name in ROUTER_SETTINGS)),
)
def update(
    name: Annotated[str, Parameter(help="the model's name in the API")],
    /,
    *,
    canary: Annotated[float, Parameter(help=_CANARY)] = 0.0,
    canary_for: Annotated[float, Parameter(help="seconds for which the canary is watched")] = 60.0,
    min_requests: Annotated[
        int, Parameter(help="requests that the canary must have completed before the update continues")
    ] = 20,
    known_answers: Annotated[
        Path | None, Parameter(help="JSON file of prompts with the outputs that the canary must give")
    ] = None,
    audit: Annotated[
        bool, Parameter(negative=(), help="audit the canary with the checks of `holdfast verify`")
    ] = False,
    server: Server = None,
    pid: Pid = None,
    config: Annotated[Path | None, Parameter(group=ESSENTIALS, help="a .yaml or .toml file of settings")] = None,
    settings: Layer,
) -> int:
    """Replace a model of a running cluster by another version, replica by replica, without ending a stream."""
    from holdfast.cluster.config.config import is_given, load_config
    from holdfast.cluster.serve.canary import read_known_answers

    answers = [] if known_answers is None else read_known_answers(known_answers)
    _check_canary(canary, has_answers=bool(answers), audit=audit)
    loaded = load_config({**settings, "model.served_model_name": Setting(name, "NAME")}, config)
    if server is not None:
        check_remote(settings, pid=pid)
        _check_remote_canary(has_answers=bool(answers), audit=audit)
        change = {
            "model": name,
            "settings": given_settings(loaded, (*MODEL_SECTIONS, "cluster")),
            "canary_share": canary,
            "canary_seconds": canary_for,
            "min_requests": min_requests,
        }
        return _say_updated(name, change_model(server, loaded, update=change))
    with connected(loaded.config, pid), progress(sys.stderr) as report:
        from holdfast.cluster.serve.models import over_running, running_settings
        from holdfast.cluster.serve.serving import update_model
        from holdfast.cluster.serve.updates import UpdatePlan

        plan = UpdatePlan(
            model=name,
            num_replicas=loaded.config.cluster.replicas if is_given(loaded, "cluster.replicas") else None,
            share=canary,
            watch_s=canary_for,
            min_requests=min_requests,
        )
        wanted = over_running(running_settings(loaded.config.cluster.namespace, name), loaded)
        updated = update_model(wanted, plan, report, answers, is_audited=audit)
    if audit:
        print(f"{name}: nothing was found by the audit of {updated.num_audited} answers of the canary")
    return _say_updated(name, updated)


def _check_remote_canary(*, has_answers: bool, audit: bool) -> None:
    """Raises `ConfigurationError`."""
    if has_answers:
        raise ConfigurationError(
            "--known-answers (with --server): known answers are requests with this machine's key, which a router "
            "must not use: run the update on the cluster's machine"
        )
    if audit:
        raise ConfigurationError("--audit (with --server): the audit needs this machine's key, as --known-answers")


def _check_canary(share: float, *, has_answers: bool, audit: bool) -> None:
    """Raises `ConfigurationError`."""
    if not 0 <= share <= 1:
        raise ConfigurationError(f"--canary = {share}: must be in [0, 1]")
    if has_answers and not share:
        raise ConfigurationError("--known-answers needs --canary: only a canary is checked against known answers")
    if audit and not share:
        raise ConfigurationError("--audit needs --canary: only a canary is audited")


def _say_updated(name: str, updated: Any) -> int:
    """`updated` is an `Updated`, or a message with its fields."""
    print(f"{name}: version {updated.new_version} serves with {updated.num_replicas} replicas; it was", end=" ")
    print(f"{updated.old_version}" if updated.old_version != updated.new_version else "the same before")
    return 0


@takes_settings("cluster", "client", without=LAYOUT_SETTINGS)
def rollback(
    name: Annotated[str, Parameter(help="the model's name in the API")],
    /,
    *,
    server: Server = None,
    pid: Pid = None,
    settings: Layer,
) -> int:
    """Undo an update that was interrupted: the model's older version serves alone again."""
    from holdfast.cluster.config.config import load_config

    loaded = load_config(settings)
    if server is not None:
        check_remote(settings, pid=pid)
        changed = change_model(server, loaded, rollback={"model": name, **given_drain(loaded)})
        removed = list(changed.removed_applications)
    else:
        with connected(loaded.config, pid):
            from holdfast.cluster.serve.serving import rollback_model

            cluster = loaded.config.cluster
            removed = rollback_model(cluster.namespace, name, cluster.drain_timeout_s)
    print(f"rolled back: {', '.join(removed)}" if removed else f"{name}: no interrupted update to roll back")
    return 0

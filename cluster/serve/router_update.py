"""Replacement of a cluster's routers by others with other settings, one after the other, by Serve's rolling update.

A router that stops hands its streams over to another. The next one stops only when its successor has the port and its
links.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve import models
from holdfast.cluster.serve.directory import Member, Role, Snapshot
from holdfast.worker.config import ServiceOrderConfig
from holdfast.worker.errors import ConfigurationError, HoldfastError, ReplicaError, UpdateRolledBackError
from holdfast.worker.progress import Report

REPLICA_SETTINGS: Final = (
    "cpus_per_rank",
    "rank_resources",
    "rank_labels",
    "span_nodes",
    "engine_port",
    "metrics_port",
    "drain_timeout_s",
)
"""Settings of the cluster that each model has its own of, besides the number of its replicas."""

ORDER: Final = tuple(ServiceOrderConfig.model_fields)
"""Settings of the section `scheduler` that a router has."""


def of_replica(config: HoldfastConfig) -> str:
    """Settings of one model's replicas, as text."""
    cluster = config.cluster.model_dump(mode="json", include=set(REPLICA_SETTINGS))
    if not config.cluster.cpus_per_rank:  # fitted into a Ray of our own: the next one is fitted anew
        del cluster["cpus_per_rank"], cluster["rank_resources"]
    scaling = config.scaling.model_dump(mode="json")
    return json.dumps({**config.worker.model_dump(mode="json"), "scaling": scaling, "cluster": cluster})


def of_router(config: HoldfastConfig) -> str:
    """Settings of the cluster's routers, as text."""
    sections = {"router", "limits", "overload", "telemetry", "health", "security"}
    tree = config.model_dump(mode="json", include=sections)
    tree["scheduler"] = config.scheduler.model_dump(mode="json", include=set(ORDER))
    tree["cluster"] = config.cluster.model_dump(mode="json", exclude={"models"})
    return json.dumps(tree)


def router_config(settings_text: str) -> HoldfastConfig:
    """The settings of `of_router`. Those of models are defaults."""
    tree: Mapping[str, Any] = json.loads(settings_text)
    return HoldfastConfig.model_validate(tree)


logger = logging.getLogger(__name__)

START_S: Final = 120.0
"""Seconds that one router may take to come up, once the one before has ended."""

_ANSWER_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.5


def running_routers(namespace: str) -> HoldfastConfig | None:
    """Settings a cluster's routers were started with; None if they do not report them. Raises `ConfigurationError`
    without a router.
    """
    routers = _routers(models.directory_of(namespace))
    return router_config(routers[0].settings) if routers and routers[0].settings else None


def replace_routers(before: HoldfastConfig, wanted: HoldfastConfig, report: Report) -> None:
    """Gives a cluster's routers the settings `wanted`. Returns when all of them serve.

    Raises `ConfigurationError` before anything is changed, `UpdateRolledBackError` where a router with them does not
    come to serve; the routers then have those of `before` again.
    """
    namespace = wanted.cluster.namespace
    directory = models.directory_of(namespace)
    _check_its_own(namespace)
    try:
        _deploy(wanted)
        _wait(directory, wanted, report)
    except BaseException as error:  # an interrupt as well
        _deploy(before)
        if not isinstance(error, HoldfastError):
            raise
        raise UpdateRolledBackError(f"the routers keep their settings: {error}") from error


def _check_its_own(namespace: str) -> None:
    """An application that has replicas as well was made by someone else's configuration, a RayService's."""
    from ray import serve

    from holdfast.cluster.serve.app import REPLICA

    if any(name.startswith(REPLICA) for name in serve.status().applications[namespace].deployments):
        raise ConfigurationError(
            f"the routers are part of the application {namespace!r} with its models: change that application's settings"
        )


def _deploy(config: HoldfastConfig) -> None:
    from ray import serve

    from holdfast.cluster.serve.app import cluster_application

    app = cluster_application(config, models.default_host(config.cluster), replaces=True)
    name = config.cluster.namespace
    target = serve.RunTarget(target=app, name=name, route_prefix=None, external_scaler_enabled=True)
    serve.run_many([target], wait_for_applications_running=False)


def _wait(directory: Any, wanted: HoldfastConfig, report: Report) -> None:
    """Waits until all serving routers have these settings and their number is right."""
    number, settings = wanted.cluster.routers, of_router(wanted)
    limit_s = number * (wanted.cluster.drain_timeout_s + START_S)
    end_s = time.monotonic() + limit_s
    while True:
        routers = _routers(directory)
        of_these = [one for one in routers if one.settings == settings]
        for router in of_these:
            if router.error is not None:
                raise ConfigurationError(router.error)
        num_up = sum(one.address is not None for one in of_these)
        report("replacing routers", num_up, number)
        if num_up == number and len(of_these) == len(routers):
            return
        if time.monotonic() > end_s:
            raise ReplicaError(f"{num_up} of {number} routers serve with the new settings after {limit_s:g} s")
        time.sleep(_LOOK_EVERY_S)


def _routers(directory: Any) -> list[Member]:
    """All, including ones that start; serving ones first."""
    snapshot: Snapshot = directory.watch.remote(0).result(timeout_s=_ANSWER_S)
    routers = [member for member in snapshot.members if member.role is Role.ROUTER]
    return sorted(routers, key=lambda one: one.address is None)


_WHOLE: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
_CONFIG: Final = "tokenizer_config.json"
_NOT_TOKENS: Final = ("chat_template", "model_max_length", "name_or_path", "transformers_version")
"""Entries of the tokenizer's configuration that change no token of a given text."""


def tokenizer_digest(folder: Path) -> str:
    """Equal for folders whose tokenizers give the same tokens, chat templates apart. 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name in _WHOLE:
        path = folder / name
        if path.is_file():
            digest.update(name.encode() + hashlib.sha256(path.read_bytes()).digest())
    config = folder / _CONFIG
    if config.is_file():
        known = {key: value for key, value in json.loads(config.read_text()).items() if key not in _NOT_TOKENS}
        digest.update(json.dumps(known, sort_keys=True).encode())
    return digest.hexdigest()[:16]

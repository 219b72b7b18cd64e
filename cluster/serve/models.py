"""Models of a running cluster: each is a separate Serve application, beside the one with routers and directory.

So a model can be added or removed without touching the others: its replicas register in the cluster's directory, and
routers find them there.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig, LoadedConfig, is_given
from holdfast.cluster.serve.directory import DIRECTORY, Role, Snapshot
from holdfast.cluster.serve.ray_internals import begin_delete, set_num_replicas
from holdfast.router.cluster_control import ClusterModel
from holdfast.router.operator_state import Change, OperatorState
from holdfast.worker.errors import ConfigurationError, UnknownModelError
from holdfast.worker.wire.loopback import ANY_INTERFACE, LOOPBACK

logger = logging.getLogger(__name__)

_SEPARATOR: Final = ":"
_GENERATION: Final = "#"
_ANSWER_S: Final = 10.0
_ORDER_S: Final = 20.0
"""A directory that has just been replaced answers after a while."""


def application_name(namespace: str, model: str, generation: int = 1) -> str:
    """The name of a model's application. Every update is a further generation of it."""
    suffix = "" if generation == 1 else f"{_GENERATION}{generation}"
    return f"{namespace}{_SEPARATOR}{model}{suffix}"


def generation_of(application: str) -> int:
    """The generation that the name of an application ends with."""
    _, mark, number = application.rpartition(_GENERATION)
    return int(number) if mark and number.isdecimal() else 1


def applications_of(namespace: str, model: str) -> list[str]:
    """Applications of one model, the oldest generation first: two while it is updated."""
    return sorted((name for name in _applications(namespace) if _model_of(namespace, name) == model), key=generation_of)


def _model_of(namespace: str, application: str) -> str:
    name = application.removeprefix(application_name(namespace, ""))
    generation = generation_of(application)
    return name if generation == 1 else name.removesuffix(f"{_GENERATION}{generation}")


def deploy(configs: Sequence[HoldfastConfig], namespace: str, directory: Any, generation: int = 1) -> None:
    """Hands models to Serve, which goes on by itself. Each of `configs` is of one model."""
    from ray import serve

    from holdfast.cluster.serve.app import model_application

    targets = [
        serve.RunTarget(
            target=model_application(config, default_host(config.cluster), directory),
            name=application_name(namespace, config.model.name, generation),
            route_prefix=None,
            external_scaler_enabled=not config.scaling.is_on,  # Serve refuses both for one application
        )
        for config in configs
    ]
    serve.run_many(targets, wait_for_applications_running=False)


def default_host(config: ClusterConfig) -> str:
    """Address that a cluster listens on if its settings name none: loopback on Holdfast's own Ray."""
    return LOOPBACK if config.address is None else ANY_INTERFACE


def add(config: HoldfastConfig) -> None:
    """Hands one more model to the cluster `config.cluster.namespace`, which goes on by itself (see `list_models`).

    Raises `ConfigurationError` where there is no such cluster, or where it has a model of this name.
    """
    namespace, name = config.cluster.namespace, config.model.name
    directory = directory_of(namespace)
    if name in {model.name for model in list_models(namespace)}:
        raise ConfigurationError(f"model.served_model_name = {name!r}: the cluster has a model of this name already")
    deploy([config], namespace, directory)


def remove(namespace: str, name: str, timeout_s: float) -> None:
    """Takes a model away, and waits until its replicas have ended, for so long at most.

    From the first moment on, new requests for it are refused by name. Running requests may finish within the drain
    timeout that the model was started with. Raises `UnknownModelError`, `TimeoutError`.
    """
    directory, models = directory_of(namespace), list_models(namespace)
    if name not in {model.name for model in models}:
        raise UnknownModelError(name, tuple(model.name for model in models))
    applications = applications_of(namespace, name)
    if not applications:
        raise ConfigurationError(
            f"model {name!r} is part of the application {namespace!r}: take it out of that application's settings"
        )
    _tell_removed(directory, name)
    delete(applications, timeout_s)
    _tell_removed(directory, name)  # once more, for a replica that began to serve meanwhile


def remove_all(namespace: str, timeout_s: float) -> None:
    """Takes all models away whose applications are their own, and waits for that."""
    delete(list(_applications(namespace)), timeout_s)


def list_models(namespace: str) -> list[ClusterModel]:
    """All models of a cluster, including ones that start or end. Raises `ConfigurationError` without one."""
    snapshot: Snapshot = directory_of(namespace).watch.remote(0).result(timeout_s=_ANSWER_S)
    replicas = [member for member in snapshot.members if member.role is Role.REPLICA]
    applications = _applications(namespace)
    statuses = {_model_of(namespace, name): str(applications[name]) for name in sorted(applications, key=generation_of)}
    names = [*statuses, *sorted({one.model for one in replicas if one.model} - set(statuses))]
    adapters = {
        name: snapshot.operator_state.adapters_of(
            name, [adapter for one in replicas if one.model == name for adapter in one.adapters]
        )
        for name in names
    }
    return [
        ClusterModel(
            name=name,
            status=statuses.get(name, "RUNNING"),
            num_replicas=sum(one.model == name and one.address is not None for one in replicas),
            engines=tuple(one.engine_address for one in replicas if one.model == name and one.engine_address),
            versions=dict(Counter(one.version for one in replicas if one.model == name and one.version)),
            num_on_full_disks=sum(one.model == name and one.is_disk_full for one in replicas),
            activity=", ".join(
                {one.error or one.phase for one in replicas if one.model == name and one.address is None}
            ),
            settings=next((one.settings for one in snapshot.serving(Role.REPLICA) if one.model == name), ""),
            adapters={one.name: one.digest for one in adapters[name]},
            pinned_adapters=tuple(one.name for one in adapters[name] if one.pinned),
        )
        for name in names
    ]


def settings_of(namespace: str) -> Mapping[str, str]:
    """Settings each serving model was started with, as its replicas report them (`router_update.py`), by model name."""
    snapshot: Snapshot = directory_of(namespace).watch.remote(0).result(timeout_s=_ANSWER_S)
    return {one.model: one.settings for one in snapshot.serving(Role.REPLICA)}


def directory_of(namespace: str) -> Any:
    """The handle of a cluster's directory. Raises `ConfigurationError` without one."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        if namespace in serve.status().applications:
            return serve.get_deployment_handle(DIRECTORY, namespace)
    except RayServeException as error:
        logger.info("Serve does not run: %s", error)
    raise ConfigurationError(f"cluster.namespace = {namespace!r}: no cluster of this name runs on this Ray")


def scale(application: str, num_replicas: int) -> None:
    """Sets the number of replicas of an application, which Serve starts or ends by itself.

    Where the load decides it, this number holds until `unpin`, within the limits of the settings.
    """
    from holdfast.cluster.serve.app import REPLICA

    if not set_num_replicas(application, REPLICA, num_replicas, _ANSWER_S):
        directory = directory_of(application.partition(_SEPARATOR)[0])
        directory.pin.remote(application, num_replicas).result(timeout_s=_ANSWER_S)


def unpin(namespace: str, model: str) -> None:
    """Restores the autoscaling of a model's applications, where it was on before."""
    directory = directory_of(namespace)
    for application in applications_of(namespace, model):
        directory.pin.remote(application, None).result(timeout_s=_ANSWER_S)


def order(directory: Any, change: Change) -> OperatorState:
    """Changes the operator state of all routers of a cluster. Raises `CallerError` for a change that cannot be."""
    operator_state: OperatorState = directory.order.remote(change).result(timeout_s=_ORDER_S)
    return operator_state


def delete(applications: Sequence[str], timeout_s: float) -> None:
    """Ends applications, and waits for that. Serve itself stays: others may use it, or it ends with our own Ray."""
    from ray import serve

    begin_delete(applications)
    deadline_s = time.monotonic() + timeout_s
    for name in applications:
        while True:
            try:
                serve.delete(name)
                break
            except TimeoutError:  # after a minute, which a long drain may take
                if time.monotonic() > deadline_s:
                    raise


def _tell_removed(directory: Any, name: str) -> None:
    directory.remove_model.remote(name).result(timeout_s=_ANSWER_S)


def _applications(namespace: str) -> Mapping[str, Any]:
    """The applications of a cluster's models, and their states."""
    from ray import serve

    found = serve.status().applications
    return {name: one.status.value for name, one in found.items() if name.startswith(application_name(namespace, ""))}


def running_settings(namespace: str, name: str) -> Mapping[str, Any]:
    """The settings of a replica that serves the model, as nested mappings. Raises `UnknownModelError`."""
    found = settings_of(namespace)
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

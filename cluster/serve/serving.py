"""Launcher of a cluster, in the process that starts it: bring it up, know its addresses, take it down."""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.cluster.config.chat_templates import with_template_texts
from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.config.model_files import check_files, check_hub
from holdfast.cluster.serve import models
from holdfast.cluster.serve.canary import KnownAnswer, Running
from holdfast.cluster.serve.directory import Role, Snapshot
from holdfast.cluster.serve.kept_process import front_process, watched_raylet
from holdfast.cluster.serve.local import num_cpus_of_our_own, ray_connection, room_of_our_own, share_cores
from holdfast.cluster.serve.node_drain import ServeSteps
from holdfast.cluster.serve.node_watch import LOOK_EVERY_S, RESERVE_BYTES, DiskGuard, MemoryWatch
from holdfast.cluster.serve.preflight import check_here
from holdfast.cluster.serve.ray_internals import ended_by_ray, session_folder
from holdfast.cluster.serve.security import check_exposed
from holdfast.cluster.serve.start_up import LINK_TIMEOUT_S, Serving, wait_until_up
from holdfast.cluster.serve.updates import Update, Updated, UpdatePlan
from holdfast.router.operator_state import Canary, Change
from holdfast.worker.errors import ConfigurationError, UnknownModelError
from holdfast.worker.progress import Report
from holdfast.worker.replica.probe_loop import ProbeLoop, probed

logger = logging.getLogger(__name__)


@contextmanager
def serving(
    config: HoldfastConfig,
    report: Report,
    on_ray_lost: Callable[[str], None] | None = None,
    forks: Path | None = None,
) -> Iterator[Serving]:
    """Runs a cluster for as long as the block lasts: on Ray of our own, or on the cluster at `cluster.address`.

    Enters the block when every router and replica is up; `report` hears of nothing after that. Leaving it drains and
    stops routers and replicas; then our own Ray, and with it every process. `on_ray_lost` is called from a thread if
    Holdfast's own Ray is lost in the block, with the name of the process that has ended. `forks` is as of
    `ray_connection`. Must run on the main thread. Raises `ConfigurationError` for what cannot work, `ReplicaError`
    where Serve gives up.
    """
    config = with_template_texts(config)
    check_exposed(config.security, config.cluster.host or models.default_host(config.cluster))
    check_here(config)
    if config.cluster.address is None:
        for one in config.each_model:
            check_hub(one)
    config = share_cores(config)
    report("starting Ray", 0, 1)
    with ray_connection(config.cluster, num_cpus_of_our_own(config), _warn, forks), ExitStack() as stack:
        report("starting Ray", 1, 1)
        if config.cluster.address is None:
            if on_ray_lost is not None:
                stack.enter_context(watched_raylet(on_ray_lost))
            stack.enter_context(_watched_node())
        check_resources(config.cluster)
        directory = _deploy(config, report)
        try:
            wanted = {one.model.name: one.first_replicas for one in config.each_model}
            up = wait_until_up(config, wanted, directory, report)
            with front_process(config, _warn) as front:
                yield replace(up, front=front)
        finally:
            models.delete([config.cluster.namespace], config.cluster.drain_timeout_s)
            models.remove_all(config.cluster.namespace, config.cluster.drain_timeout_s)


@contextmanager
def _watched_node() -> Iterator[None]:
    """Says for as long as the block lasts what of this machine runs out."""
    guard = DiskGuard(session_folder(), _warn, reserve_bytes=RESERVE_BYTES)
    memory = MemoryWatch(_warn, by_ray=ended_by_ray)
    try:
        with probed(
            ProbeLoop("disk-guard", LOOK_EVERY_S, guard.look), ProbeLoop("memory-watch", LOOK_EVERY_S, memory.look)
        ):
            yield
    finally:
        guard.close()


def _warn(text: str) -> None:
    print(f"holdfast: {text}", file=sys.stderr, flush=True)


def add_model(config: HoldfastConfig, report: Report) -> int:
    """Adds a model to the running cluster of `cluster.namespace`, on the Ray that this process is connected to.

    Returns the number of its replicas when all of them serve. Raises `ConfigurationError` for what cannot work,
    `ReplicaError` where Serve gives up; the model is taken away again then.
    """
    namespace, name = config.cluster.namespace, config.model.name
    config = with_template_texts(config)
    if config.cluster.address is None:
        check_files(config)
        check_hub(config)
        config = _fitted(share_cores(config))
    models.add(config)
    try:
        wanted = {name: config.first_replicas}
        up = wait_until_up(_of_any_routers(config), wanted, models.directory_of(namespace), report)
        return up.num_replicas[name]
    except BaseException:  # an interrupt as well
        models.remove(namespace, name, config.cluster.drain_timeout_s)
        raise


def update_model(
    config: HoldfastConfig,
    plan: UpdatePlan,
    report: Report,
    known_answers: Sequence[KnownAnswer] = (),
    *,
    is_audited: bool = False,
) -> Updated:
    """Replaces a model of the running cluster by what `config` says, replica by replica, under the same name.

    `is_audited`: a canary is asked the questions of `holdfast verify`.

    Returns when the old version has drained. Raises `ConfigurationError` for what cannot work, and
    `UpdateRolledBackError` where the new version was taken back; the old one serves on then.
    """
    config = with_template_texts(config)
    if config.cluster.address is None:
        check_files(config)
        check_hub(config)
        config = _fitted(config)
    return Update(ServeSteps(config, known_answers, plan.share, is_audited), plan, report).run()


def running_models(namespace: str) -> dict[str, Running]:
    """The models that a cluster serves. Raises `ConfigurationError` without such a cluster."""
    settings = models.settings_of(namespace)
    return {
        one.name: Running(settings=json.loads(settings[one.name]), num_replicas=one.num_replicas)
        for one in models.list_models(namespace)
        if one.name in settings
    }


def scale_model(config: HoldfastConfig, report: Report) -> int:
    """Gives a model of the running cluster `cluster.replicas` replicas, and waits until all of them serve. Returns
    their number. Raises `UnknownModelError`, and `ReplicaError` where Serve gives up.
    """
    namespace, name = config.cluster.namespace, config.model.name
    applications = models.applications_of(namespace, name)
    if not applications:
        raise UnknownModelError(name, tuple(models.settings_of(namespace)))
    models.scale(applications[-1], config.cluster.replicas)
    wanted = {name: config.cluster.replicas}
    config = _of_any_routers(config)
    return wait_until_up(config, wanted, models.directory_of(namespace), report).num_replicas[name]


def _of_any_routers(config: HoldfastConfig) -> HoldfastConfig:
    """The routers run already, however many there are: the settings of a model do not say."""
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"routers": 1})})


def rollback_model(namespace: str, name: str, timeout_s: float) -> list[str]:
    """Removes the applications that an interrupted update has left beside a model's oldest one. Returns their names."""
    directory, applications = models.directory_of(namespace), models.applications_of(namespace, name)
    snapshot: Snapshot = directory.watch.remote(0).result(timeout_s=LINK_TIMEOUT_S)
    serving = snapshot.serving(Role.REPLICA)
    kept = {one.version for one in serving if one.application in applications[:1]}
    for version in {one.version for one in serving if one.application in applications[1:]} - kept:
        models.order(directory, Change("with_canary", (name, Canary(model=name, version=version, share=0.0))))
        models.order(directory, Change("with_retired", (name, version, True)))
    models.delete(applications[1:], timeout_s)
    models.order(directory, Change("with_canary", (name, None)))
    for application in applications:
        models.order(directory, Change("with_held", (application, False)))
    return applications[1:]


def _fitted(config: HoldfastConfig) -> HoldfastConfig:
    """Our own Ray counts CPUs for the models that it was started with. Another model shares their directory and
    routers.
    """
    import ray

    wanted = config.most_replicas * config.parallel.tensor_parallel_size * config.cluster.cpus_per_rank
    if ray.available_resources().get("CPU", 0.0) >= wanted:
        return config
    resources = config.cluster.rank_resources | room_of_our_own()
    cluster = config.cluster.model_copy(update={"cpus_per_rank": 0.0, "rank_resources": resources})
    return config.model_copy(update={"cluster": cluster})


def check_resources(cluster: ClusterConfig) -> None:
    """Refuses custom resources on our own Ray, which is this machine and never gets more."""
    if cluster.address is not None:
        return
    from holdfast.cluster.serve.placement_groups import node_resources, unmet

    settings = {"cluster.rank_resources": cluster.rank_resources, "cluster.router_resources": cluster.router_resources}
    for setting, resources in settings.items():
        if missing := unmet(resources, node_resources()):
            raise ConfigurationError(
                f"{setting} = {resources}: this machine has too little {' and '.join(missing)}; custom resources are "
                f"for a Ray cluster that was started with them, which cluster.address names"
            )


def _deploy(config: HoldfastConfig, report: Report) -> Any:
    """Hands the applications to Serve, which goes on by itself. Returns the directory's handle."""
    from ray import serve

    from holdfast.cluster.serve.app import cluster_application

    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # importing it has set another level
    report("starting Serve", 0, 1)
    serve.start(proxy_location="Disabled")
    name = config.cluster.namespace
    app = cluster_application(config, models.default_host(config.cluster))
    target = serve.RunTarget(target=app, name=name, route_prefix=None, external_scaler_enabled=True)
    serve.run_many([target], wait_for_applications_running=False)
    directory = models.directory_of(name)
    models.deploy(config.each_model, name, directory)
    report("starting Serve", 1, 1)
    return directory

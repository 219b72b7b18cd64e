"""Ray Serve applications: a cluster's directory, routers and replicas, and one more model for a cluster.

    serve.run(build_app({"model": {"model": "demo"}, "cluster": {"replicas": 2}}), name="holdfast")
    serve.run(build_model({"model": {"model": "./other"}}), name="holdfast:other")

or, in a RayService's `serveConfigV2`, `import_path: holdfast:build_app` with the same tree under `args`.
"""

import logging
from collections.abc import Mapping
from hashlib import blake2b
from importlib.metadata import version
from typing import Any, Final

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from holdfast.cluster.config.chat_templates import with_template_texts
from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig, load_config
from holdfast.cluster.config.sources import mapping_layer
from holdfast.cluster.serve.directory import DIRECTORY, DirectoryDeployment
from holdfast.cluster.serve.engine_api import ApiSettings
from holdfast.cluster.serve.metrics_api import MetricsSettings
from holdfast.cluster.serve.placement_groups import node_resources
from holdfast.cluster.serve.rank_placement import RankPlacement, warn_of_unmet
from holdfast.cluster.serve.ray_internals import check_labels
from holdfast.cluster.serve.replica_deployment import ReplicaDeployment
from holdfast.cluster.serve.router_deployment import RouterDeployment
from holdfast.cluster.serve.router_update import of_replica
from holdfast.cluster.serve.scaling_policy import ScalingPolicy
from holdfast.cluster.serve.security import ClusterSecurity, check_exposed, cluster_token
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.wire.loopback import ANY_INTERFACE

logger = logging.getLogger(__name__)

ANSWER_S: Final = 5.0
"""Seconds that a running directory may take to return its token."""

REPLICA: Final = "Replica"
ROUTER: Final = "Router"

HEALTH_CHECK_PERIOD_S: Final = 1.0
"""Serve notices a process that has ended at its next check, and only then starts another."""

HEALTH_CHECK_TIMEOUT_S: Final = 3.0
"""A process that has not answered for so long, three times in a row, is asked to drain, and ended by Serve after that.
Leaders and routers that hang are found earlier by their hang supervisors: this is for the directory, and for processes
that still load or have no hang supervisor."""

_QUIET: Final = {"log_level": "WARNING", "enable_access_log": False}

_SHUTDOWN_SLACK_S: Final = 10.0
"""Seconds that Serve waits after the drain before it kills."""

_MANY: Final = 10_000
"""More than ever ask a directory at once: one call per member and watcher. Of a router, more than it admits."""


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """The application for a tree of settings, as in a configuration file. Raises `ConfigurationError`.

    Needs a connection to the Ray cluster that it will run on: the placement depends on the resources of its nodes.
    """
    config = with_template_texts(load_config(mapping_layer(HoldfastConfig, args, "build_app")).config)
    check_exposed(config.security, config.cluster.host or ANY_INTERFACE)
    directory = _directory(config)
    names = [REPLICA] if len(config.each_model) == 1 else [f"{REPLICA}:{one.model.name}" for one in config.each_model]
    replicas = [
        _replicas(one, ANY_INTERFACE, directory, name) for one, name in zip(config.each_model, names, strict=True)
    ]
    return cluster_application(config, ANY_INTERFACE, directory, *replicas)


def build_model(args: Mapping[str, Any]) -> serve.Application:
    """The application of one more model for the cluster whose application is named `cluster.namespace`.

    Takes the settings of `build_app`; settings of routers and requests are the cluster's. Deploy it as
    `{namespace}:{model}`, so that `holdfast models` finds it.
    """
    config = with_template_texts(load_config(mapping_layer(HoldfastConfig, args, "build_model")).config)
    if config.cluster.models:
        raise ConfigurationError("cluster.models: build_model makes the application of one model, model.model")
    return model_application(config, ANY_INTERFACE, config.cluster.namespace)


def model_application(config: HoldfastConfig, default_host: str, directory: Any) -> serve.Application:
    """The replicas of one model. `directory` is a handle of the cluster's, or the name of the cluster's application."""
    return _replicas(config, default_host, directory, REPLICA)


def cluster_application(
    config: HoldfastConfig,
    default_host: str,
    directory: serve.Application | None = None,
    *replicas: serve.Application,
    replaces: bool = False,
) -> serve.Application:
    """Directory and routers, with replicas or without. Routers listen on `default_host` if no host is set.

    `replaces`: others serve at their ports, and go as these come.
    """
    warn_of_unmet("router", config.cluster.router_resources, node_resources())
    directory = _directory(config) if directory is None else directory
    host = config.cluster.host or default_host
    router = _router(config, replaces=replaces)
    return router.bind(config, host, directory, *replicas, replaces=replaces)


def _replicas(config: HoldfastConfig, default_host: str, directory: Any, name: str) -> serve.Application:
    placement = RankPlacement.of(config)
    placed = _replica(config, name, placement)
    api, metrics = _api(config, default_host), _metrics(config, default_host)
    settings_text = of_replica(config)
    more = {"domain_label": config.cluster.domain_label, "is_killable": config.router.killable}
    settings = (config.worker, placement.bundle, config.cluster.drain_timeout_s)
    return placed.bind(*settings, directory, api, metrics, settings_text, **more)


def _metrics(config: HoldfastConfig, default_host: str) -> MetricsSettings | None:
    """Settings of replicas' metrics: as routers', on `default_host` if no host is set."""
    if config.cluster.metrics_port is None:
        return None
    return MetricsSettings(host=config.cluster.host or default_host, port=config.cluster.metrics_port)


def _api(config: HoldfastConfig, default_host: str) -> ApiSettings | None:
    """Settings of replicas' engine protocol: as routers', on `default_host` if no host is set."""
    if config.cluster.engine_port is None:
        return None
    host = config.cluster.host or default_host
    return ApiSettings(host=host, port=config.cluster.engine_port, router=config.router, limits=config.limits)


def _directory(config: HoldfastConfig) -> serve.Application:
    """The directory, which gives the cluster's token to all members. An existing directory is kept: members know its
    token.
    """
    token = known_token(config.cluster.namespace)
    if token is None or config.security.cluster_token_file is not None:
        token = cluster_token(config.security)
    security = ClusterSecurity(token=token, settings=config.security)
    deployment = serve.deployment(
        DirectoryDeployment,
        name=DIRECTORY,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MANY,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=1.0,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        logging_config=_QUIET,
    )
    # Serve takes a deployment without a version for another one: a directory stays while routers are replaced.
    return deployment.options(version=_version(security), _internal=True).bind(security)


def _version(security: ClusterSecurity) -> str:
    seen = f"{version('holdfast')} {security.token} {security.settings.model_dump_json()}"
    return blake2b(seen.encode(), digest_size=8).hexdigest()


def known_token(namespace: str) -> str | None:
    """The token of the cluster that runs under this name; None if there is none, or its directory does not answer."""
    if not ray.is_initialized():
        return None
    try:
        if namespace not in serve.status().applications:
            return None
        known = serve.get_deployment_handle(DIRECTORY, namespace).security.remote().result(timeout_s=ANSWER_S)
    except Exception as error:  # noqa: BLE001 - Ray raises many kinds
        logger.info("no directory has answered: %s", error)
        return None
    return str(known.token)


def _replica(config: HoldfastConfig, name: str, placement: RankPlacement) -> serve.Deployment:
    bundle, labels, num_ranks = placement.bundle, placement.labels, config.parallel.tensor_parallel_size
    return serve.deployment(
        ReplicaDeployment,
        name=name,
        **number_of_replicas(config),
        placement_group_bundles=[bundle] * num_ranks,
        placement_group_strategy="PACK" if config.cluster.span_nodes else "STRICT_PACK",
        placement_group_bundle_label_selector=[labels] * num_ranks if labels else None,
        ray_actor_options={"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)},
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=config.cluster.drain_timeout_s + _SHUTDOWN_SLACK_S,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        logging_config=_QUIET,
    )


def _router_options(cluster: ClusterConfig, *, replaces: bool) -> dict[str, Any]:
    """Holdfast's own Ray counts CPUs for the initial number of routers; a router that stops keeps its CPU until it has
    ended.
    """
    num_cpus = 0 if replaces and cluster.address is None else 1
    check_labels("cluster.router_labels", cluster.router_labels)
    labels = {"label_selector": cluster.router_labels} if cluster.router_labels else {}
    return {"num_cpus": num_cpus, "resources": cluster.router_resources, **labels}


def number_of_replicas(config: HoldfastConfig) -> dict[str, Any]:
    """Serve's settings for the number of replicas: fixed, or decided by Holdfast's policy without delay.

    A deployment that runs already keeps the number that it has.
    """
    scaling = config.scaling
    if not scaling.is_on:
        return {"num_replicas": config.cluster.replicas}
    policy = AutoscalingPolicy(
        policy_function=ScalingPolicy,
        policy_kwargs={
            "model": config.model.name,
            "namespace": config.cluster.namespace,
            "max_num_seqs": config.scheduler.max_num_seqs,
            "settings": scaling.model_dump(mode="json"),
        },
    )
    runs = ray.is_initialized() and _runs_already(config)
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scaling.min_replicas,
            initial_replicas=None if runs else config.first_replicas,
            max_replicas=scaling.max_replicas,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            downscale_to_zero_delay_s=0.0,
            policy=policy,
        )
    }


def _runs_already(config: HoldfastConfig) -> bool:
    """Whether the application with all models is there. One of a single model is new: an update makes another."""
    try:
        applications = serve.status().applications
    except Exception as error:  # noqa: BLE001 - Ray raises many kinds
        logger.info("Ray Serve did not return its status: %s", error)
        return False
    running = applications.get(config.cluster.namespace)
    return running is not None and any(name.startswith(REPLICA) for name in running.deployments)


def _router(config: HoldfastConfig, *, replaces: bool) -> serve.Deployment:
    return serve.deployment(
        RouterDeployment,
        name=ROUTER,
        num_replicas=config.cluster.routers,
        max_ongoing_requests=_MANY,  # calls through handles: a router bounds what waits by itself
        ray_actor_options=_router_options(config.cluster, replaces=replaces),
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=config.cluster.drain_timeout_s + _SHUTDOWN_SLACK_S,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        logging_config=_QUIET,
    )

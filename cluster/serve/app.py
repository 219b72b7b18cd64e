"""Ray Serve application: one directory, replicas, and routers in front of them.

    serve.run(build_app({"model": {"model": "demo"}, "cluster": {"replicas": 2}}))

or, in a RayService's `serveConfigV2`, `import_path: holdfast:build_app` with the same tree under `args`. What may not
live here: what the deployments do, and starting Ray or Serve.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any, Final

from ray import serve

from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig, load_config
from holdfast.cluster.config.sources import mapping_layer
from holdfast.cluster.serve.directory import DirectoryDeployment
from holdfast.cluster.serve.placement_groups import Resources, choose_strategy, node_resources, rank_bundle, unmet
from holdfast.cluster.serve.replica_deployment import ReplicaDeployment
from holdfast.cluster.serve.router_deployment import ANY_INTERFACE, RouterDeployment

logger = logging.getLogger(__name__)

DIRECTORY: Final = "Directory"
REPLICA: Final = "Replica"
ROUTER: Final = "Router"

HEALTH_CHECK_PERIOD_S: Final = 2.0
"""Serve notices a process that has ended at its next check."""

HEALTH_CHECK_TIMEOUT_S: Final = 3.0
"""A process that has not answered for so long, three times in a row, is asked to drain, and ended by Serve after that.
Leaders and routers that hang are found earlier by their hang supervisors: this is for the directory, and for processes
that still load or have no hang supervisor."""

_QUIET: Final = {"log_level": "WARNING", "enable_access_log": False}

_SHUTDOWN_SLACK_S: Final = 10.0
"""What Serve waits on top of the drain before it kills."""

_MANY: Final = 10_000
"""More than ever ask a directory at once: one call per member and watcher."""


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """The application for a tree of settings, as in a configuration file. Raises `ConfigurationError`.

    Needs a connection to the Ray cluster that it is to run on: what its nodes have decides the placement.
    """
    config = load_config(mapping_layer(HoldfastConfig, args, "build_app")).config
    return application(config, ANY_INTERFACE)


def application(config: HoldfastConfig, default_host: str) -> serve.Application:
    """As `build_app`, for settings that have been checked. Routers listen on `default_host` if no host is set."""
    directory = _directory().bind()
    nodes = node_resources()
    _warn_of_unmet(config.cluster, nodes)
    bundle = rank_bundle(config.worker, config.cluster, nodes)
    num_ranks = config.parallel.tensor_parallel_size
    strategy = choose_strategy(bundle, num_ranks, config.cluster.replicas, nodes)
    if strategy == "PACK":
        logger.warning(
            "%d replicas of %d ranks do not fit on whole nodes: ranks of one replica may talk over the network, "
            "which is slow",
            config.cluster.replicas,
            num_ranks,
        )
    placed = _replica(config, [bundle] * num_ranks, strategy)
    replicas = placed.bind(config.worker, bundle, config.cluster.drain_timeout_s, directory)
    return _router(config).bind(config, config.cluster.host or default_host, directory, replicas)


def _warn_of_unmet(cluster: ClusterConfig, nodes: Collection[Resources]) -> None:
    """No error, because a cluster may grow."""
    for setting, resources in (("rank", cluster.rank_resources), ("router", cluster.router_resources)):
        for name in unmet(resources, nodes):
            logger.warning(
                "cluster.%s_resources: no node has %g of %s yet; they wait for one", setting, resources[name], name
            )


def _directory() -> serve.Deployment:
    return serve.deployment(
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


def _replica(config: HoldfastConfig, bundles: list[dict[str, float]], strategy: str) -> serve.Deployment:
    return serve.deployment(
        ReplicaDeployment,
        name=REPLICA,
        num_replicas=config.cluster.replicas,
        placement_group_bundles=bundles,
        placement_group_strategy=strategy,
        ray_actor_options={"num_cpus": bundles[0].get("CPU", 0), "num_gpus": bundles[0].get("GPU", 0)},
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=config.cluster.drain_timeout_s + _SHUTDOWN_SLACK_S,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        logging_config=_QUIET,
    )


def _router(config: HoldfastConfig) -> serve.Deployment:
    return serve.deployment(
        RouterDeployment,
        name=ROUTER,
        num_replicas=config.cluster.routers,
        ray_actor_options={"num_cpus": 1, "resources": config.cluster.router_resources},
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=config.cluster.drain_timeout_s + _SHUTDOWN_SLACK_S,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        logging_config=_QUIET,
    )

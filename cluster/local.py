"""A connection to Ray: to a cluster that is there, or to one of our own on this machine, which ends with us."""

import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from cluster.config import ClusterConfig, HoldfastConfig

LOOPBACK: Final = "127.0.0.1"


@contextmanager
def ray_connection(config: ClusterConfig, num_cpus: int) -> Iterator[None]:
    """Connects to `config.address`, or starts a Ray of our own that counts `num_cpus` CPUs. Always disconnects.

    Our own Ray listens on loopback and asks every client for a token that only our processes know: otherwise any user of
    the machine could run code in it.
    """
    if config.address is None:
        os.environ.update(_own_environment())
    import ray

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet = {"log_to_driver": False, "configure_logging": False, "namespace": config.namespace}
    if config.address is not None:
        ray.init(address=config.address, **quiet)
    else:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=config.object_store_memory,
            include_dashboard=False,
            _node_ip_address=LOOPBACK,
            **quiet,
        )
    try:
        yield
    finally:
        ray.shutdown()


def num_cpus_of_our_own(config: HoldfastConfig) -> int:
    """The CPUs that our own Ray counts: the machine's, or more where the ranks would not fit. They share what there is."""
    ranks = config.cluster.replicas * config.parallel.tensor_parallel_size
    return max(num_cores(), round(ranks * config.cluster.cpus_per_rank) + config.cluster.routers)


def share_cores(config: HoldfastConfig) -> HoldfastConfig:
    """On one machine all ranks share the cores: each gets as many threads as there are cores for it."""
    if config.cluster.address is not None or config.parallel.num_threads is not None:
        return config
    ranks = config.cluster.replicas * config.parallel.tensor_parallel_size
    parallel = config.parallel.model_copy(update={"num_threads": max(1, num_cores() // ranks)})
    return config.model_copy(update={"parallel": parallel})


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _own_environment() -> Mapping[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }

"""Connection to Ray: to an existing cluster, or to a private one on this machine, which ends with this process.

What may not live here: Serve, and what runs on the cluster (`app.py`).
"""

import functools
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig

LOOPBACK: Final = "127.0.0.1"


@contextmanager
def ray_connection(config: ClusterConfig, num_cpus: int) -> Iterator[None]:
    """Connects to `config.address`, or starts a Ray of our own that counts `num_cpus` CPUs. Always disconnects.

    Our own Ray asks every client for a token that only our processes know, because whoever reaches its ports can run
    code. It listens on loopback alone, unless this process has imported Ray before: then it is too late to say so.
    """
    if config.address is None:
        _close_our_own()
    import ray

    on_sigterm = signal.getsignal(signal.SIGTERM)
    quiet = {"log_to_driver": False, "configure_logging": False, "namespace": config.namespace}
    if config.address is not None:
        ray.init(address=config.address, **quiet)
    else:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=config.object_store_memory,
            include_dashboard=False,
            **quiet,
        )
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray has installed its own handler, which exits at once
    try:
        yield
    finally:
        ray.shutdown()


def num_cpus_of_our_own(config: HoldfastConfig) -> int:
    """The CPUs that our own Ray counts: the machine's, or more if the ranks would not fit. They share what there is."""
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


def _close_our_own() -> None:
    """Ray takes these settings from the environment, most of them once, when it is imported."""
    was_imported = "ray" in sys.modules
    if not was_imported:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # on Linux as well: one machine, on loopback
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=_token(), RAY_USAGE_STATS_ENABLED="0")
    if was_imported:
        from ray._raylet import Config  # type: ignore[attr-defined]  # compiled

        Config.initialize("")  # reads the environment again


@functools.cache
def _token() -> str:
    """Ray remembers the first token that a process used, so there is one for the life of the process."""
    return secrets.token_hex(32)

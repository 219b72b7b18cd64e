"""Connection to Ray: to an existing cluster, or to a private one on this machine, which ends with this process."""

import functools
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.serve import agent_stand_in, reaper, worker_launcher
from holdfast.cluster.serve.fork_server import started_server
from holdfast.cluster.serve.kept_process import kept_gcs, tables_folder
from holdfast.cluster.serve.member_process import read_on_one_thread
from holdfast.cluster.serve.ray_internals import HeadNode, at_address, read_environment_again
from holdfast.cluster.serve.running import noted, running_cluster
from holdfast.worker.errors import ReplicaError
from holdfast.worker.wire.loopback import LOOPBACK

logger = logging.getLogger(__name__)

RECONNECT_S: Final = 600
"""Seconds that Ray's processes wait for a lost GCS. Then each of them ends, and the cluster starts anew."""

ANSWER_S: Final = 5.0


class PrivateRay:
    """A running one. `process` is the current process of its GCS."""

    name: Final = "Ray's GCS"
    effect: Final = "streams continue"

    def __init__(self, head: HeadNode) -> None:
        self._head = head
        self.address = head.address
        """`host:port` of the GCS, which stays the same."""

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self._head.gcs

    def answers(self) -> bool:
        """Whether the GCS answers within `ANSWER_S`."""
        try:
            self._head.ask_gcs(ANSWER_S)
        except Exception as error:  # noqa: BLE001 - Ray raises many classes here, without a common one
            logger.debug("Ray's GCS does not answer: %s", error)
            return False
        return True

    def start_again(self) -> None:
        """Starts the GCS that has ended once more, with the same tables, at the same address.

        It ends with the calling thread.
        """
        words = self._head.gcs_command()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, reaper.TIED_TO, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for this process alone
        )
        process.args = words
        self._head.gcs = process


@contextmanager
def private_ray(host: str, num_cpus: int, object_store_memory: int, forks: Path | None = None) -> Iterator[PrivateRay]:
    """Starts it with this many CPUs and this many bytes of shared memory, and ends all of it after the block.

    All of its processes listen on the address `host` alone. Its workers are forked by the server at `forks`, or else by
    a new server. On the main thread, whose end is that of Ray's processes. Raises what Ray raises where it does not
    start.
    """
    with ExitStack() as stack:
        tables = stack.enter_context(tables_folder())
        head = HeadNode(
            host=host,
            num_cpus=num_cpus,
            object_store_memory=object_store_memory,
            tables=tables,
            setup_worker=worker_launcher.__file__,
            worker=str(forks or stack.enter_context(started_server(tables / "forks"))),
            agent_command=lambda services: [sys.executable, "-I", "-S", agent_stand_in.__file__, services],
        )
        try:
            yield PrivateRay(head)
        finally:
            head.kill()


REACH_S: Final = 10.0


@contextmanager
def ray_connection(
    config: ClusterConfig,
    num_cpus: int,
    say: Callable[[str], None] = logger.warning,
    forks: Path | None = None,
) -> Iterator[None]:
    """Connects to `config.address`, or starts a private Ray that counts `num_cpus` CPUs. Always disconnects.

    A private Ray asks every client for a token that only our processes know, because a client that reaches its ports
    can run code. It listens on loopback alone, also where this process has imported Ray before. `say` hears when its
    GCS has ended, which then starts again. `forks`: the socket of a fork server for its workers, where one runs
    already.
    """
    if config.address is None:
        _close_our_own()
    else:
        check_reachable(config.address)
    with ExitStack() as stack:
        address, place = config.address, dict[str, Any]()
        if address is None:
            address = stack.enter_context(_our_own_ray(config, num_cpus, say, forks))
            place = at_address(LOOPBACK)
        import ray

        on_sigterm = signal.getsignal(signal.SIGTERM)
        stack.callback(ray.shutdown)
        with plain_ray_errors(config.address):
            ray.init(address=address, log_to_driver=False, configure_logging=False, namespace=config.namespace, **place)
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has installed its own handler, which exits at once
        if config.address is None:
            stack.enter_context(noted(config.namespace, address, _token(), [ports[0] for ports in config.router_ports]))
        yield


@contextmanager
def _our_own_ray(config: ClusterConfig, num_cpus: int, say: Callable[[str], None], forks: Path | None) -> Iterator[str]:
    """Address of a Ray that Holdfast starts. It outlives this process's connection, which needs the GCS in order to
    end.
    """
    with ExitStack() as stack:
        with plain_ray_errors(None):
            ray = stack.enter_context(private_ray(LOOPBACK, num_cpus, config.object_store_memory, forks))
        stack.enter_context(kept_gcs(ray, say, ray.answers))
        yield ray.address


def check_reachable(address: str) -> None:
    """Raises `ReplicaError` at once where nothing listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "://" in host:
        return  # such as `auto`, which Ray looks up
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ReplicaError(
            f"cluster.address = {address!r}: no Ray can be joined there ({error}); is it the GCS address that "
            "`ray start --head` has printed (port 6379 unless said otherwise), and does a firewall let this machine in?"
        ) from error


@contextmanager
def plain_ray_errors(address: str | None) -> Iterator[None]:
    """Raises `ReplicaError` with the last line of Ray's error, which says the most."""
    try:
        yield
    except Exception as error:  # Ray raises many classes here, without a common one
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = f"{type(error).__name__}: {lines[-1] if lines else 'it does not say why'}"[:300]
        if address is not None:
            way_out = "does `ray status` there answer, and are Ray's versions and its token (RAY_AUTH_TOKEN) the same?"
            raise ReplicaError(
                f"cluster.address = {address!r}: no Ray can be joined there ({said}); {way_out}"
            ) from error
        way_out = (
            "is there room in /tmp and /dev/shm, and memory for cluster.object_store_memory? Ray's own logs are in "
            "/tmp/ray/session_latest/logs (`holdfast logs`), and `holdfast doctor` looks at this machine"
        )
        raise ReplicaError(f"Ray did not start ({said}); {way_out}") from error


@contextmanager
def running_ray(config: ClusterConfig, pid: int | None) -> Iterator[None]:
    """Connects to the Ray of a running cluster: the one at `config.address`, or a private one of this machine and user.

    Raises `ConfigurationError` if there is none, or more than one (see `running_cluster`).
    """
    address = config.address
    if address is None:
        running = running_cluster(config.namespace, pid)
        address = running.ray_address
        _close_our_own(running.token)
    check_reachable(address)
    import ray

    with plain_ray_errors(address):
        ray.init(address=address, log_to_driver=False, configure_logging=False, namespace=config.namespace)
    try:
        yield
    finally:
        ray.shutdown()


def num_cpus_of_our_own(config: HoldfastConfig) -> int:
    """The CPUs that our own Ray counts: the machine's, or more if the ranks would not fit. They share the machine's
    CPUs.
    """
    cpus = sum(_num_ranks(one) * one.cluster.cpus_per_rank for one in config.each_model)
    return max(num_cores(), round(cpus) + config.cluster.routers)


def share_cores(config: HoldfastConfig) -> HoldfastConfig:
    """On one machine the ranks of all models share the cores: each rank gets as many threads as it has cores."""
    if config.cluster.address is not None or config.parallel.num_threads is not None:
        return config
    ranks = sum(map(_num_ranks, config.each_model))
    parallel = config.parallel.model_copy(update={"num_threads": max(1, num_cores() // ranks)})
    return config.model_copy(update={"parallel": parallel})


def _num_ranks(config: HoldfastConfig) -> int:
    """Ranks of all replicas of one model, at the largest number of replicas."""
    return config.most_replicas * config.parallel.tensor_parallel_size


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def room_of_our_own() -> dict[str, float]:
    """Resources that a rank asks of Holdfast's own Ray where no CPU is left to count: a part of the machine, which
    ranks share.
    """
    import ray

    (node,) = ray.nodes()
    return {next(name for name in node["Resources"] if name.startswith("node:")): 0.001}


def _close_our_own(token: str | None = None) -> None:
    """Ray takes these settings from the environment, most of them once, when it is imported.

    `token` is that of a Ray that runs already.
    """
    was_imported = "ray" in sys.modules
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # on Linux as well: one machine, on loopback
    read_on_one_thread(os.environ)  # for the processes that Ray starts; this one may have imported gRPC
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token or _token(), RAY_USAGE_STATS_ENABLED="0")
    os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(RECONNECT_S)  # noqa: SIM112  # as Ray spells it
    if was_imported:
        read_environment_again()


@functools.cache
def _token() -> str:
    """Ray remembers the first token that a process used, so there is one for the life of the process."""
    return secrets.token_hex(32)

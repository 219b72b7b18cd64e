"""Ray of one machine that consists of its GCS and its raylet alone: how both start, and how the GCS starts again.

Ray's dashboard, autoscaler and log monitor do nothing for a cluster of ours, nor do the raylet's two agents, with
whose end the raylet ends: stand-ins take the agents' place. The GCS keeps its tables in files (RocksDB is part of it),
so that it may end and start again while all else goes on. Private API of Ray is used for this, as it was read in 2.58
and 2.60. What may not live here: connecting to it (`local.py`), and when the GCS starts again (`gcs_keeper.py`).
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from holdfast.cluster.serve import agent_stand_in, reaper, worker_launcher
from holdfast.cluster.serve.fork_server import started_server
from holdfast.cluster.serve.gcs_tables import tables_folder

logger = logging.getLogger(__name__)

RECONNECT_S: Final = 600
"""How long Ray's processes wait for a GCS that is away. Each of them ends then, and the cluster starts anew."""

ANSWER_S: Final = 5.0

GCS: Final = "gcs_server"

AGENT_SERVICES: Final = {
    "dashboard_agent": "metrics_agent_port,metrics_export_port,dashboard_agent_listen_port",
    "runtime_env_agent": "runtime_env_agent_port",
}
"""Of each agent of a raylet: the services whose ports the raylet waits for. No actor of ours has a `runtime_env`."""


class PrivateRay:
    """A running one. `gcs` is the current process of its GCS."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self.address: str = node.gcs_address
        """`host:port` of the GCS, which stays the same."""
        self.gcs: subprocess.Popen[bytes] = self._processes[0].process

    @property
    def _processes(self) -> list[Any]:
        processes: list[Any] = self._node.all_processes[GCS]
        return processes

    def answers(self) -> bool:
        """Whether the GCS answers within `ANSWER_S`."""
        try:
            self._node.get_gcs_client().internal_kv_exists(b"holdfast", None, timeout=ANSWER_S)
        except Exception as error:  # Ray raises many classes here, without a common one
            logger.debug("Ray's GCS does not answer: %s", error)
            return False
        return True

    def start_gcs(self) -> subprocess.Popen[bytes]:
        """Starts the GCS that has ended once more, with the same tables, at the same address.

        It ends with the calling thread.
        """
        words = [_with_port(str(word), self.address) for word in self.gcs.args]  # type: ignore[union-attr]
        self.gcs = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, reaper.TIED_TO, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for this process alone
        )
        self.gcs.args = words
        self._processes[0] = self._processes[0]._replace(process=self.gcs)
        return self.gcs


@contextmanager
def private_ray(host: str, num_cpus: int, object_store_memory: int, forks: Path | None = None) -> Iterator[PrivateRay]:
    """Starts it with so many CPUs to count and so many bytes of shared memory, and ends all of it after the block.

    All of its processes listen on the address `host` alone. Its workers are forked by the server at `forks`, else by
    one that starts here. On the main thread, whose end is that of Ray's processes.
    Raises what Ray raises where it does not start.
    """
    from ray._private.parameter import RayParams

    params = RayParams(
        node_ip_address=host,
        num_cpus=num_cpus,
        object_store_memory=object_store_memory,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
    )
    with ExitStack() as stack:
        tables = stack.enter_context(tables_folder())
        params.setup_worker_path = worker_launcher.__file__
        params.worker_path = str(forks or stack.enter_context(started_server(tables / "forks")))
        params._system_config = {"gcs_storage": "rocksdb", "gcs_storage_path": str(tables)}
        node = _node_class()(params, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)
        try:
            yield PrivateRay(node)
        finally:
            node.kill_all_processes(check_alive=False, allow_graceful=True)


def _node_class() -> type[Any]:
    """A function, because Ray takes seconds to import."""
    from ray._private import services
    from ray._private.node import Node

    class HeadNode(Node):  # type: ignore[misc]
        """The head node of a Ray that nobody but us uses."""

        def start_api_server(self, **_options: object) -> None:
            """There is no dashboard."""

        def start_raylet(self, *arguments: object, **options: object) -> None:
            original = services._build_python_executable_command_memory_profileable
            services._build_python_executable_command_memory_profileable = _stand_in
            try:
                super().start_raylet(*arguments, **options)
            finally:
                services._build_python_executable_command_memory_profileable = original

    return HeadNode


def _stand_in(agent: str, *_arguments: object, **_options: object) -> list[str]:
    """The first words of an agent's command line, which its script and options follow."""
    return [sys.executable, "-I", "-S", agent_stand_in.__file__, AGENT_SERVICES[agent]]


def _with_port(word: str, address: str) -> str:
    """A word of the GCS's command line: the first one was told to choose its port."""
    option = "--gcs_server_port="
    return option + address.rpartition(":")[2] if word.startswith(option) else word

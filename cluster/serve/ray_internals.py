"""Private APIs of Ray that Holdfast uses, all of them, as they were read in Ray 2.60.

No import of Ray at load: Ray takes seconds to import, and reads settings from the environment while it does.
`worker_launcher.py` is a script that imports nothing of Holdfast; it starts two files of Ray's by their paths.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from holdfast.worker.errors import ConfigurationError

logger = logging.getLogger(__name__)

PROCESS_MODULES: Final = (
    "ray._private.workers.default_worker",
    "ray.serve._private.controller",
    "ray.serve._private.replica",
    "ray.serve._private.proxy",
)
"""Modules that Ray's worker processes and Serve's import."""

AGENT_SERVICES: Final = {
    "dashboard_agent": "metrics_agent_port,metrics_export_port,dashboard_agent_listen_port",
    "runtime_env_agent": "runtime_env_agent_port",
}
"""Services whose ports the raylet waits for, for each of its agents. No Holdfast actor has a `runtime_env`."""

_GCS: Final = "gcs_server"
_PORT_OPTION: Final = "--gcs_server_port="


class HeadNode:
    """The head node of a private Ray, started by this process."""

    def __init__(
        self,
        *,
        host: str,
        num_cpus: int,
        object_store_memory: int,
        tables: Path,
        setup_worker: str,
        worker: str,
        agent_command: Callable[[str], list[str]],
    ) -> None:
        """Starts it with this number of CPUs and bytes of shared memory, on the main thread: Ray's processes end with
        it. All of them listen on `host` alone.

        `tables` is the folder of the GCS's tables. `setup_worker` and `worker` are the paths that a raylet starts in
        place of a worker, `agent_command` gives the first words of an agent's command line from the agent's services.
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
        params.setup_worker_path, params.worker_path = setup_worker, worker
        params._system_config = {"gcs_storage": "rocksdb", "gcs_storage_path": str(tables)}
        node_class = _node_class(agent_command)
        self._node = node_class(params, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)
        self.address: str = self._node.gcs_address
        """`host:port` of the GCS, which stays the same."""

    @property
    def gcs(self) -> "subprocess.Popen[bytes]":
        """The process of the GCS."""
        process: subprocess.Popen[bytes] = self._node.all_processes[_GCS][0].process
        return process

    @gcs.setter
    def gcs(self, process: "subprocess.Popen[bytes]") -> None:
        processes = self._node.all_processes[_GCS]
        processes[0] = processes[0]._replace(process=process)

    def gcs_command(self) -> list[str]:
        """The command line that starts the GCS again, at the same address."""
        port = self.address.rpartition(":")[2]
        words = map(str, self.gcs.args)  # type: ignore[arg-type]
        # At its first start it chose a free port.
        return [_PORT_OPTION + port if word.startswith(_PORT_OPTION) else word for word in words]

    def ask_gcs(self, timeout_s: float) -> None:
        """Raises what Ray raises, of many classes, where the GCS does not answer in time."""
        self._node.get_gcs_client().internal_kv_exists(b"holdfast", None, timeout=timeout_s)

    def kill(self) -> None:
        """Ends all of its processes."""
        self._node.kill_all_processes(check_alive=False, allow_graceful=True)


def _node_class(agent_command: Callable[[str], list[str]]) -> type[Any]:
    from ray._private import services
    from ray._private.node import Node

    def stand_in(agent: str, *_arguments: object, **_options: object) -> list[str]:
        """The first words of an agent's command line, which its script and options follow."""
        return agent_command(AGENT_SERVICES[agent])

    class PrivateHead(Node):  # type: ignore[misc]
        """The head node of a Ray that only Holdfast uses."""

        def start_api_server(self, **_options: object) -> None:
            """There is no dashboard."""

        def start_raylet(self, *arguments: object, **options: object) -> None:
            original = services._build_python_executable_command_memory_profileable
            services._build_python_executable_command_memory_profileable = stand_in
            try:
                super().start_raylet(*arguments, **options)
            finally:
                services._build_python_executable_command_memory_profileable = original

    return PrivateHead


def at_address(host: str) -> dict[str, Any]:
    """Arguments of `ray.init` by which a driver takes `host` for its node's address."""
    return {"_node_ip_address": host}


def read_environment_again() -> None:
    """Reads Ray's settings again, for a process that imported Ray before they were in the environment."""
    from ray._private import ray_constants
    from ray._raylet import Config  # type: ignore[attr-defined]  # compiled

    ray_constants.ENABLE_RAY_CLUSTER = False  # RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER, which is read at the import
    Config.initialize("")  # reads the environment again


def draw_class_ids_from_the_kernel() -> None:
    """Ray draws the id of each class of actors from a generator whose state all forks would have: equal ids of tasks.

    A generator that was not used before a fork takes its seed from the kernel. To be called before the fork.
    """
    if "ray.actor" in sys.modules:
        return
    import ray.actor

    drawn: Any = ray.actor.ActorClassID

    class KernelDrawn:
        @staticmethod
        def from_random() -> Any:
            return drawn(os.urandom(drawn.size()))

    ray.actor.ActorClassID = KernelDrawn


# --- of a node or cluster that this process is connected to ---


def session_folder() -> Path:
    """Folder of the logs and sockets of this node's session."""
    import ray

    return Path(ray._private.worker._global_node.get_session_dir_path())


def ended_by_ray() -> int:
    """Processes that Ray's memory monitor has ended in the cluster; 0 if Ray does not answer."""
    from ray._private.state import state
    from ray.core.generated.common_pb2 import WorkerExitType
    from ray.core.generated.gcs_pb2 import WorkerTableData

    try:
        workers = state._connect_and_get_accessor().get_worker_table()
    except Exception as error:  # noqa: BLE001 - a GCS server that does not answer: others notice that
        logger.debug("Ray did not return the ended processes: %s", error)
        return 0
    ended = map(WorkerTableData.FromString, workers)
    return sum(one.exit_type == WorkerExitType.NODE_OUT_OF_MEMORY for one in ended)


def drain_node(gcs_address: str, node_id: str, reason: str, deadline_ms: int) -> None:
    """Tells Ray to move all work from a node to others, and to end the rest at `deadline_ms`, in Unix time. Raises
    `RuntimeError` with Ray's reason where it refuses.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    kind = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    is_accepted, why_not = GcsClient(address=gcs_address).drain_node(node_id, kind, reason, deadline_ms)
    if not is_accepted:
        raise RuntimeError(why_not)


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Free resources by node id."""
    from ray._private.state import available_resources_per_node

    free: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    return free


def is_selected(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node with these labels fits a label selector."""
    from ray._raylet import node_labels_match_selector  # type: ignore[attr-defined]  # compiled

    return bool(node_labels_match_selector(dict(labels), dict(selector)))


def check_labels(setting: str, selector: Mapping[str, str]) -> None:
    """Raises `ConfigurationError` for what Ray cannot select nodes by."""
    from ray._private.label_utils import validate_label_selector

    problem = validate_label_selector(dict(selector))
    if problem:
        raise ConfigurationError(f"{setting} = {dict(selector)}: {problem}")


# --- Serve ---


def set_num_replicas(application: str, deployment: str, num_replicas: int, timeout_s: float) -> bool:
    """Whether Serve took the number; it refuses where an autoscaling policy decides it."""
    import ray
    from ray.serve._private.common import DeploymentID
    from ray.serve._private.exceptions import ExternalScalerDisabledError
    from ray.serve.context import _get_global_client

    controller = _get_global_client()._controller
    named = DeploymentID(name=deployment, app_name=application)
    try:
        ray.get(controller.update_deployment_replicas.remote(named, num_replicas), timeout=timeout_s)
    except ExternalScalerDisabledError:
        return False
    return True


def begin_delete(applications: Sequence[str]) -> None:
    """Has Serve end applications, all at once, without waiting for that."""
    from ray import serve

    for name in applications:
        serve.delete(name, _blocking=False)


_ANYWHERE: Final = "[::]:"


def listen_on_the_node_alone() -> None:
    """Makes Serve listen on the node's address alone. Called in the process of a deployment while it is made: Serve
    then opens a port on every interface (`ReplicaBase._on_initialized`), for calls between deployments over gRPC, and
    dials it by the node's address.
    """
    import ray
    from ray.serve._private import replica

    add_port = replica.add_port_to_grpc_server
    if getattr(add_port, "is_narrow", False):
        return
    host = ray.util.get_node_ip_address()

    def narrow(server: Any, address: str) -> Any:
        return add_port(server, on_host(address, host))

    narrow.is_narrow = True  # type: ignore[attr-defined]
    replica.add_port_to_grpc_server = narrow


def on_host(address: str, host: str) -> str:
    """`address`, or the same port of `host` where it stands for every interface."""
    if not address.startswith(_ANYWHERE):
        return address
    port = address.removeprefix(_ANYWHERE)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

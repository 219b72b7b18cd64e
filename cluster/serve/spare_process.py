"""Spare process: one idle worker process of our own Ray with a replica's libraries loaded, for the next start.

Ray gives an actor an idle process where there is one. Ours imports `preloaded.py` in every worker process, which loads
the libraries where the process is still idle after a while; and replicas that serve see to it that there is one. What
may not live here: anything that a replica needs (`replica_deployment.py`): without a spare it only starts slower.
"""

import fcntl
import importlib
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

PRELOADED: Final = "holdfast.cluster.serve.preloaded"
"""The module that worker processes import at their start, where spares are wanted."""

IDLE_S: Final = 2.0
"""A process that has become no actor's by then is spare."""

LIBRARIES: Final = (
    "ray.serve._private.replica",
    "holdfast.cluster.serve.replica_deployment",
    "torch",
    "holdfast.worker.engine.model_runner",
)

KEPT_S: Final = 7 * 24 * 3600
"""How long Ray lets an idle process be."""

APPEARS_S: Final = 20.0
_LOOK_S: Final = 0.5
_IDLE: Final = b"ray::IDLE"


def load_if_idle() -> None:
    """In a worker process that has just started: loads the libraries on a thread, later, unless it is used by then."""
    threading.Thread(target=_load_if_idle, name="spare process", daemon=True).start()


def _load_if_idle() -> None:
    from ray._private.worker import global_worker

    time.sleep(IDLE_S)
    for library in LIBRARIES:
        if global_worker.actor_id.is_nil():
            importlib.import_module(library)


def keep_one(folder: Path) -> None:
    """Asks Ray for an idle process if there is none. Blocking; `folder` is that of Ray's session on this machine.

    Only where worker processes load the libraries when they are idle. Of several that ask at once, one does.
    """
    if PRELOADED not in sys.modules:
        return
    with open(folder / "holdfast-spare.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if num_idle(os.getppid()) == 0:
            _prestart()
            end_s = time.monotonic() + APPEARS_S
            while num_idle(os.getppid()) == 0 and time.monotonic() < end_s:
                time.sleep(_LOOK_S)


def num_idle(raylet_pid: int) -> int:
    """Idle worker processes of a raylet."""
    found = 0
    for path in Path(f"/proc/{raylet_pid}/task").glob("*/children"):
        for pid in path.read_text().split():
            with suppress(OSError):  # it has just ended
                found += Path(f"/proc/{pid}/cmdline").read_bytes().startswith(_IDLE)
    return found


def _prestart() -> None:
    """Ray starts a process for this job, as it does by itself where it expects to need one."""
    import ray
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc

    here = ray.get_runtime_context()
    node = next(node for node in ray.nodes() if node["NodeID"] == here.get_node_id())
    request = node_manager_pb2.PrestartWorkersRequest(
        job_id=bytes.fromhex(here.get_job_id()), keep_alive_duration_secs=KEPT_S, num_workers=1
    )
    with init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as channel:
        node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=5.0)

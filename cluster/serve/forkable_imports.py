"""Imports of the processes that fork a cluster's processes, made so that each fork is as good as a new interpreter.

Private behaviour of Ray is used for this, as it was read in 2.60: what Ray's import reads from the environment, and
which of its imports draw random numbers.
"""

import gc
import importlib
import os
import sys
from collections.abc import Iterable
from typing import Any, Final

IMPORTED: Final = (
    "ray._private.workers.default_worker",
    "ray.serve._private.controller",
    "ray.serve._private.replica",
    "ray.serve._private.proxy",
    "holdfast.cluster.serve.serving",
    "holdfast.cluster.serve.directory",
    "holdfast.cluster.serve.router_deployment",
    "holdfast.cluster.serve.replica_deployment",
    "holdfast.worker.replica.rank",
    "torch",
)
"""What the processes of a cluster import. None of these modules starts a thread or opens a connection."""

NO_JOB: Final = "ffffffff"
"""A worker of no job belongs to that of its first task, as one does that Ray starts ahead of need."""


def import_for_forks(modules: Iterable[str]) -> None:
    """Imports in a new process, which owns what it forks. A worker of Ray ends with the parent of this process."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # else NumPy starts threads when it is imported
    os.environ["RAY_JOB_ID"], os.environ["RAY_RAYLET_PID"] = NO_JOB, str(os.getppid())  # Ray reads them once
    os.environ["RAY_AUTH_MODE"] = "token"  # as well: a fork that was told of the mode later would present no token
    for name in modules:
        if name.startswith(("ray.", "holdfast.cluster.")):
            _draw_class_ids_from_the_kernel()
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what has been imported stays shared: a collection would write to each of its objects


def _draw_class_ids_from_the_kernel() -> None:
    """Ray draws the id of each class of actors from a generator whose state all forks would have: equal ids of tasks.

    A generator that nobody has used before a fork takes its seed from the kernel.
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

"""Memory watch: says when a process of this machine was ended for want of memory, which that process cannot say itself.

The kernel's OOM killer ends one process; Ray's memory monitor ends several before it comes to that. What may live here:
hearing of both. What may not: what is free (`worker/available_memory.py`), and starting again what has ended (Serve).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from holdfast.cluster.serve.regular_looks import regular_looks
from holdfast.worker.available_memory import oom_kills

logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 5.0

ADVICE: Final = (
    "lower --replicas, --tp, --kv-cache-memory or --max-num-seqs, or serve a smaller model (`holdfast estimate` says "
    "what one needs)"
)


class MemoryWatch:
    """Counts from when it is made on. `look` is called from time to time, on one thread."""

    def __init__(
        self,
        say: Callable[[str], None],
        by_kernel: Callable[[], int] = oom_kills,
        by_ray: Callable[[], int] = lambda: 0,
    ) -> None:
        """`say` hears of every new one. `by_kernel` and `by_ray` count the processes that each has ended so far."""
        self._say = say
        self._counts = {"the kernel": by_kernel, "Ray's memory monitor": by_ray}
        self._seen = {name: count() for name, count in self._counts.items()}

    def look(self) -> None:
        """Says what has ended since the last look."""
        for name, count in self._counts.items():
            ended = count() - self._seen[name]
            if ended > 0:
                self._seen[name] += ended
                processes = "a process" if ended == 1 else f"{ended} processes"
                self._say(
                    f"out of memory: {name} has ended {processes} on this machine. Streams go on where there is "
                    f"another replica, and what has ended starts again; {ADVICE}"
                )


@contextmanager
def watched_memory(watch: MemoryWatch) -> Iterator[None]:
    """Looks from a thread of its own for as long as the block lasts, and once more in the end."""
    with regular_looks(watch.look, LOOK_EVERY_S, "memory-watch"):
        yield


def ended_by_ray() -> int:
    """How many processes Ray's memory monitor has ended in the cluster that this process is connected to."""
    from ray._private.state import state
    from ray.core.generated.common_pb2 import WorkerExitType
    from ray.core.generated.gcs_pb2 import WorkerTableData

    try:
        workers = state._connect_and_get_accessor().get_worker_table()
    except Exception as error:  # a GCS server that does not answer: others notice that
        logger.debug("Ray does not tell which processes have ended: %s", error)
        return 0
    ended = map(WorkerTableData.FromString, workers)
    return sum(one.exit_type == WorkerExitType.NODE_OUT_OF_MEMORY for one in ended)

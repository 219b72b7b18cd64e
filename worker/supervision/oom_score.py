"""OOM score of a process (`oom_score_adj`, proc(5)): which one the kernel ends first when memory runs out.

Ray starts each worker with 1000, the highest. Then the largest one goes first: a router that serves, while a replica
that has just begun to load takes its memory. Here what costs streams least goes first.
"""

import logging
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from typing import Final

from holdfast.worker.supervision.process_id import ProcessId

logger = logging.getLogger(__name__)

_PROC: Final = Path("/proc")


class OomScore(IntEnum):
    """In thousandths of the limit; the kernel adds it to the memory of a process. A replica that loads keeps 1000."""

    SERVING_REPLICA = 700
    """Its streams go on at another replica."""
    ROUTER = 300
    """Its clients have to find another router. The directory has this score as well."""


def lower_oom_score(score: OomScore, processes: Iterable[ProcessId], proc: Path = _PROC) -> None:
    """Of processes of this user on this machine. The kernel refuses a value below what a privileged process set last (a
    container's runtime does): the score then stays as it is, which costs only the order.
    """
    for process in processes:
        file = proc / str(process.pid) / "oom_score_adj"
        try:
            if int(file.read_text()) > score:
                file.write_text(str(int(score)))
        except (OSError, ValueError) as error:
            logger.debug("the OOM score of process %d stays as it is: %s", process.pid, error)

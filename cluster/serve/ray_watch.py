"""Watch over the raylet of the Ray that this process has started: with it, all that runs on Ray ends.

What may live here: finding that process and hearing of its end. What may not: what follows from it, and the end of the
GCS (`gcs_keeper.py`).
"""

import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from holdfast.cluster.serve.reaper import descendants

RAYLET: Final = "raylet"


@contextmanager
def watched_raylet(on_loss: Callable[[str], None]) -> Iterator[None]:
    """Calls back once, from a thread of its own, with the name of the raylet if it ends in the block."""
    (raylet,) = [pid for pid in descendants(os.getpid()) if _name(pid) == RAYLET]
    end = os.pidfd_open(raylet)
    is_over, over = os.pipe()

    def wait() -> None:
        ended, _, _ = select.select([is_over, end], [], [])
        if is_over not in ended:
            on_loss(RAYLET)

    thread = threading.Thread(target=wait, name="ray-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(over)
        thread.join()
        for descriptor in (is_over, end):
            os.close(descriptor)


def _name(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/comm") as file:
        return file.read().strip()
    return ""

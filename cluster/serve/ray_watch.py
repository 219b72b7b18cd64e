"""Watch over the Ray that this process has started: without its GCS server or its raylet there is no cluster.

What may live here: finding those processes and hearing of their end. What may not: what follows from it.
"""

import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from holdfast.cluster.serve.reaper import descendants

VITAL: Final = ("gcs_server", "raylet")


@contextmanager
def watched_ray(on_loss: Callable[[str], None]) -> Iterator[None]:
    """Calls back once, from a thread of its own, with the name of the first vital process that ends in the block."""
    found = {os.pidfd_open(pid): name for pid in descendants(os.getpid()) if (name := _name(pid)) in VITAL}
    assert sorted(found.values()) == sorted(VITAL), f"Ray's processes should be {VITAL}: {found}"

    is_over, over = os.pipe()

    def wait() -> None:
        ended, _, _ = select.select([is_over, *found], [], [])
        if is_over not in ended:
            on_loss(found[ended[0]])

    thread = threading.Thread(target=wait, name="ray-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(over)
        thread.join()
        for descriptor in (is_over, *found):
            os.close(descriptor)


def _name(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/comm") as file:
        return file.read().strip()
    return ""

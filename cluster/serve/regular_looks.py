"""Regular looks: something is looked at from time to time, on a thread of its own, for as long as a block lasts.

What may not live here: what is looked at (`disk_guard.py`, `memory_watch.py`).
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def regular_looks(look: Callable[[], object], every_s: float, name: str) -> Iterator[None]:
    """Calls `look` at once, every `every_s` seconds, and once more in the end. A failed look is logged."""
    is_over = threading.Event()

    def look_once() -> None:
        try:
            look()
        except Exception:
            logger.warning("%s: a look has failed", name, exc_info=True)

    def keep_looking() -> None:
        look_once()
        while not is_over.wait(every_s):
            look_once()
        look_once()

    thread = threading.Thread(target=keep_looking, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()

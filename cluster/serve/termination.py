"""SIGTERM handler of a router's or replica's process: it drains and ends, as if Serve had asked it to.

What may not live here: what ends, and in which order (`router_deployment.py`, `replica_deployment.py`).
"""

import asyncio
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine

logger = logging.getLogger(__name__)


def end_on_sigterm(end: Callable[[], Coroutine[object, object, None]], limit_s: float) -> None:
    """At the first SIGTERM, awaits `end` on the running event loop for so long at most, and exits.

    Ray keeps the main thread of an actor on asyncio inside of compiled code, where no handler written in Python ever
    runs. `faulthandler` has one in C, which can be put in place from any thread: the trace that it writes is the news.
    """
    loop = asyncio.get_running_loop()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)  # a handler must not wait, however many signals come
    faulthandler.register(signal.SIGTERM, file=write_end, all_threads=False)

    def wait() -> None:
        os.read(read_end, 1)
        logger.warning("SIGTERM: this process ends")
        try:
            asyncio.run_coroutine_threadsafe(end(), loop).result(limit_s)
        finally:
            os._exit(0)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()

"""A call on another thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    """What a call on another thread returns or raises. Of a thread that is stranded the future is never done."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done

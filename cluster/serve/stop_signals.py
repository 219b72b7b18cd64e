"""Stop signals, SIGINT, SIGTERM and SIGHUP, as bytes of a pipe.

An exception out of a handler could strike inside of a lock and leave it broken. On the main thread alone.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""SIGHUP: the terminal has gone. Where it is ignored, as below `nohup`, it stays so."""


@contextmanager
def stop_signals() -> Iterator[int]:
    """The end to read of a pipe that gets a byte, the signal's number, for each signal that comes in the block."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    earlier_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    taken = [number for number in STOP_SIGNALS if not _is_ignored(number)]
    earlier = {number: signal.signal(number, lambda *_: None) for number in taken}
    try:
        yield read_end
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(earlier_fd)
        os.close(read_end)
        os.close(write_end)


def _is_ignored(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN

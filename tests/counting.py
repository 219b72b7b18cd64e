"""Counts of calls and of memory that are the same on every machine and in any company.

What else a process does must not count, so: a count is one thread's; the collector rests, since its runs depend on all
that ran before and call back (of `hypothesis`, of weak references); and what is counted gets the time from `Ticks`,
since code that fits or schedules by measured times calls other functions on a busy machine. What cannot be counted by
thread, as memory, is counted in a process of its own.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Ticks:
    """A clock that is 1 ms later each time it is read, and whose alarms never ring."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s

    time = __call__

    def call_at(self, when: float, callback: Callable[[], object], /) -> "Ticks":
        return self

    def cancel(self) -> None: ...


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """The garbage collector does not run inside; there is no garbage at the beginning."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Counted:
    """Calls of functions in this thread, of Python's by name and in all, of C's in all, between `begin` and `end`."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._rest = collector_at_rest()

    def begin(self) -> None:
        self._rest.__enter__()
        sys.setprofile(self._note)

    def end(self) -> None:
        sys.setprofile(None)
        self._rest.__exit__(None, None, None)

    def __enter__(self) -> Counter[str]:
        self.begin()
        return self.calls

    def __exit__(self, *_: object) -> None:
        self.end()

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self.calls["all of Python"] += 1
            self.calls[frame.f_code.co_name] += 1
        elif event == "c_call":
            self.calls["all of C"] += 1


def mapped_rss(stretches: set[tuple[int, int]]) -> int:
    """Bytes of these stretches of addresses, as (start, end), that have memory, by the page map: no other's count."""
    page, present = 4096, 1 << 63
    total = 0
    with Path("/proc/self/pagemap").open("rb") as pages:
        for start, end in stretches:
            first, last = -(-start // page), end // page
            pages.seek(first * 8)
            entries = pages.read((last - first) * 8)
            numbers = (int.from_bytes(entries[at : at + 8], "little") for at in range(0, len(entries), 8))
            total += page * sum(bool(number & present) for number in numbers)
    return total

"""Libraries that would take the place of our own code, beside it, on the work that it does: microseconds, and ratios.

    pip install sortedcontainers limits msgspec
    python -m benchmarks.library_choices

What follows from it is in docs/architecture.md.
"""

import json
import random
import timeit
from collections.abc import Callable
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from holdfast.router.api.http.bodies import ChatBody
from holdfast.router.token_bucket import TokenBucket
from holdfast.worker.timers import Timers

KEYS: Final = 2000
TIMES: Final = [random.Random(1).random() for _ in range(10 * KEYS)]
BODY: Final = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 16, "stream": True}
).encode()


def set_and_pop(timers: Any) -> None:
    """As for requests' limits: most are set anew, or dropped, before they are due."""
    for number, when in enumerate(TIMES):
        timers.set(number % KEYS, when)
    while timers.pop(2.0) is not None:
        pass


class SortedTimers:
    """`Timers` as a sorted list."""

    def __init__(self) -> None:
        from sortedcontainers import SortedList

        self._entries: dict[int, tuple[float, int]] = {}
        self._sorted: Any = SortedList()

    def set(self, key: int, when: float) -> None:
        if (old := self._entries.get(key)) is not None:
            self._sorted.remove(old)
        self._entries[key] = (when, key)
        self._sorted.add(self._entries[key])

    def pop(self, now: float) -> int | None:
        if not self._sorted or self._sorted[0][0] > now:
            return None
        _, key = self._sorted.pop(0)
        del self._entries[key]
        return int(key)


def take_from_bucket() -> Callable[[], object]:
    bucket = TokenBucket(1e9)

    def take() -> None:
        bucket.wait_s(1.0, 1.0)
        bucket.take(1.0, 1.0)

    return take


def take_from_limits() -> Callable[[], object]:
    from limits import parse
    from limits.storage import MemoryStorage
    from limits.strategies import SlidingWindowCounterRateLimiter

    limiter, rate = SlidingWindowCounterRateLimiter(MemoryStorage()), parse("100000000/minute")
    return lambda: limiter.hit(rate, "key")


def read_by_msgspec() -> Callable[[], object]:
    import msgspec

    fields = [("model", str), ("messages", list[dict[str, Any]]), ("max_tokens", int), ("stream", bool)]
    decoder = msgspec.json.Decoder(msgspec.defstruct("Body", fields))
    return lambda: decoder.decode(BODY)


def microseconds(call: Callable[[], object], number: int = 40, repeat: int = 150) -> float:
    """The best of short runs: others on the machine take whole slices."""
    return 1e6 * min(timeit.repeat(call, number=number, repeat=repeat)) / number


def main() -> None:
    scale = 1 / len(TIMES)
    rows = (
        (
            "a timer set, and popped by its turn",
            scale * microseconds(lambda: set_and_pop(Timers()), 1, 7),
            scale * microseconds(lambda: set_and_pop(SortedTimers()), 1, 7),
        ),
        ("one request of a rate", microseconds(take_from_bucket()), microseconds(take_from_limits())),
        ("a chat's body", microseconds(lambda: ChatBody.read(BODY)), microseconds(read_by_msgspec())),
    )
    table = Table("work", "ours, us", "sortedcontainers, limits, msgspec, us", "ratio")
    for name, ours, theirs in rows:
        table.add_row(name, f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()

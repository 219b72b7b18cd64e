"""Overload watch: when a router looks at what it uses, and what a look leads to. A core without IO.

watch = OverloadWatch(overload)
wait_s = watch.begin(now, num_open)             # look again after so long
watch.look(now, resident_bytes, num_open)       # True: shrink the heap, and call `overload.note_shrunk`
"""

from collections.abc import Callable
from typing import Final

from holdfast.router.overload.byte_ledger import Lease
from holdfast.router.overload.overload import Overload, OverloadAction, Readings

BUSY_S: Final = 0.25
"""Between two looks while anything is open or any action is on."""

IDLE_S: Final = 2.0

SHRINK_EVERY_S: Final = 5.0


class OverloadWatch:
    """Of one router, on its event loop."""

    def __init__(self, overload: Overload, on_closing: Callable[[Lease], None] = lambda lease: None) -> None:
        """`on_closing` is told of each request that is ended for what it holds, before it is."""
        self._overload = overload
        self._on_closing = on_closing
        self._shrunk_at: float | None = None

    def begin(self, now: float, num_open: int) -> float:
        """The timer is set anew: in how many seconds it is to fire."""
        overload = self._overload
        is_busy = bool(num_open or overload.ledger.num_leases or overload.active)
        wait_s = BUSY_S if is_busy else IDLE_S
        overload.note_loop(now, wait_s)
        return wait_s

    def look(self, now: float, resident_bytes: int, num_open: int) -> bool:
        """The timer has fired. Ends the greediest request where that is due; whether the heap is to be shrunk."""
        overload = self._overload
        readings = Readings(resident_bytes=resident_bytes, held_bytes=overload.ledger.held_bytes, num_open=num_open)
        overload.observe(readings, now)
        if overload.must_close(now) and (lease := overload.ledger.greediest()) is not None:
            self._on_closing(lease)
            lease.end(overload.note_closed(lease.held_bytes, now))
        is_due = self._shrunk_at is None or now - self._shrunk_at >= SHRINK_EVERY_S
        if OverloadAction.SHRINK_HEAP not in overload.active or not is_due:
            return False
        self._shrunk_at = now
        return True

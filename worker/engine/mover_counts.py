"""Reports of a block mover: events for the leader, counts, and measured transfer speeds."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

LEAST_MEASURED_BYTES: Final = 1 << 16
"""Shorter transfers tell nothing of the speed: they take as long as their beginning."""
MAX_HOSTS: Final = 64
"""Hosts whose speed is remembered."""
_WEIGHT: Final = 0.2  # of the newest transfer in the moving average


class MoverEvents(NamedTuple):
    """Events for a leader, on the mover's thread."""

    on_news: Callable[[list[bytes], list[bytes]], None]
    """Names that came to the store, and those that went."""
    on_piece: Callable[[int], None]
    """The next piece of a ticket is there."""
    on_written: Callable[[], None]
    """There is room for more."""
    on_failed: Callable[[int], None]
    """A ticket gets no further piece: another replica does not send it."""


class MoverCounts:
    """Counts of a mover. Written by its thread, read by any."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self.num_bytes = 0
        self.num_failures = 0
        """Blocks with a wrong digest."""
        self.num_errors = 0
        """Writes and reads that failed."""
        self.staged_bytes = 0
        self.read_s_per_byte = 1e-9
        """Seconds per byte of the disk, digests and copies; measured."""
        self.copy_s_per_byte = 5e-10
        """CPU time of the thread of the steps; measured."""
        self.write_s_per_byte = 1e-9
        """CPU time of the mover's thread; measured."""
        self.received_bytes_per_s: Mapping[str, float] = {"": 1e9}
        """Speed of transfers by the other replica's host, and of all by the name ""; measured."""
        self.num_received_bytes = 0
        self.num_sent_bytes = 0

    def note(self, name: str, began_s: float, ended_s: float, num_bytes: int) -> None:
        """Takes a measured time into the mean of this name, in seconds per byte."""
        if num_bytes:
            old = getattr(self, name)
            setattr(self, name, old + _WEIGHT * ((ended_s - began_s) / num_bytes - old))

    def note_speed(self, host: str, lasted_s: float, num_bytes: int) -> None:
        """Takes a transfer from a host into the speeds."""
        if num_bytes < LEAST_MEASURED_BYTES:
            return
        old = self.received_bytes_per_s
        found = {name: old.get(name, old[""]) for name in ("", host)}
        # A mean of times, as each byte counts: mean speeds would forget how slow the slow ones are.
        means = {name: 1 / (1 / speed + _WEIGHT * (lasted_s / num_bytes - 1 / speed)) for name, speed in found.items()}
        others = {name: speed for name, speed in old.items() if name not in found}
        kept = list(others.items())[-MAX_HOSTS:]
        self.received_bytes_per_s = {**dict(kept), **means}

"""Circuit breaker of one replica: after failures in a row it gets no new attempts for a while, longer each time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

NUM_FAILURES_TO_REST: Final = 3
"""Failures in a row, without a successful attempt in between, that open the breaker."""

FIRST_REST_S: Final = 1.0
MAX_REST_S: Final = 30.0
MEMORY_S: Final = 60.0
"""Seconds that the failures of a lost replica are kept, in case it returns with the same id."""


class CircuitBreaker:
    """Counts the failures in a row of one replica. A rest does not end by itself but in `end_rest`."""

    def __init__(self) -> None:
        self.rests_until: float | None = None
        """None: the breaker is closed, and the replica may get attempts."""
        self.on_change: Callable[[], None] | None = None
        """Called when the breaker may have opened or closed."""
        self.num_failures = 0
        """Failures in a row. Read-only."""
        self._last_failure_at = 0.0

    def note_failure(self, now: float) -> None:
        """An attempt failed there by the replica's own fault."""
        self.num_failures += 1
        self._last_failure_at = now
        if self.num_failures >= NUM_FAILURES_TO_REST:
            self.rest_until(now + self._rest_s)

    def note_success(self) -> None:
        """An attempt brought its first output there."""
        self.num_failures = 0
        if self.rests_until is not None:
            self._set(None)

    def note_sent(self, now: float) -> None:
        """After a rest one attempt probes the replica (half-open); others follow when it has brought output."""
        if self.num_failures >= NUM_FAILURES_TO_REST:
            self.rest_until(now + self._rest_s)

    def rest_until(self, when: float) -> None:
        """No new attempts before `when`, or before a later time that was set earlier."""
        self._set(when if self.rests_until is None else max(when, self.rests_until))

    def end_rest(self, now: float) -> None:
        """Ends a rest whose time is over."""
        if self.rests_until is not None and now >= self.rests_until:
            self._set(None)

    def is_forgotten(self, now: float) -> bool:
        """Whether it may be replaced by a new breaker."""
        if self.num_failures == 0:
            return self.rests_until is None or now >= self.rests_until
        return now - self._last_failure_at > MEMORY_S

    def _set(self, rests_until: float | None) -> None:
        self.rests_until = rests_until
        if self.on_change is not None:
            self.on_change()

    @property
    def _rest_s(self) -> float:
        num_rests = min(self.num_failures - NUM_FAILURES_TO_REST, 10)
        return min(FIRST_REST_S * 2.0**num_rests, MAX_REST_S)


FIRST_PAUSE_S: Final = 0.05
MAX_DOUBLINGS: Final = 10  # of the pause
FORGIVEN_S: Final = 60.0
"""A session that lasted this long resets the count of faulty sessions."""


@dataclass(slots=True, kw_only=True)
class Backoff:
    """The pauses between connection attempts of one link."""

    max_pause_s: float
    num_failed: int = 0
    """Failed connection attempts in a row."""
    num_faults: int = 0
    """Short sessions in a row that ended by a bug in Holdfast, or by a message that cannot be read. Their dials
    succeed, so `num_failed` does not count them."""

    def note_up(self) -> None:
        """A connection attempt succeeded."""
        self.num_failed = 0

    def note_fault(self, lasted_s: float) -> None:
        """A session ended by a fault of either side after `lasted_s`. Its cause may still be there."""
        self.num_faults = 1 if lasted_s >= FORGIVEN_S else self.num_faults + 1

    def note_failure(self) -> None:
        """A connection attempt failed."""
        self.num_failed += 1

    def pause_s(self, uniform: float) -> float:
        """The pause before the next dial; `uniform` as for `growing_pause_s`."""
        return growing_pause_s(max(self.num_failed, self.num_faults), self.max_pause_s, uniform)


def growing_pause_s(num_doublings: int, max_pause_s: float, uniform: float, hint_s: float = 0.0) -> float:
    """`FIRST_PAUSE_S` doubled `num_doublings` times, at most `max_pause_s`, but at least `hint_s` of a server.

    Jitter then takes away up to half, to spread out clients that failed together: `uniform` is random in [0, 1).
    """
    longest_s = max(hint_s, min(FIRST_PAUSE_S * 2.0 ** min(num_doublings, MAX_DOUBLINGS), max_pause_s))
    return longest_s * (1 + uniform) / 2

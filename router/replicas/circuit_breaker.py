"""Circuit breaker of one replica: after failures in a row it gets no new attempts for a while, longer each time.

What may live here: the count of failures and the end of the rest. What may not: what counts as a failure
(`router/dispatch/placement.py`: only a replica's own faults, never a caller's mistake), clocks.
"""

from collections.abc import Callable
from typing import Final

NUM_FAILURES_TO_REST: Final = 3
"""Failures in a row, without a successful attempt in between, that open the breaker."""

FIRST_REST_S: Final = 1.0
MAX_REST_S: Final = 30.0
MEMORY_S: Final = 60.0
"""How long the failures of a lost replica are kept, in case it returns with the same id."""


class CircuitBreaker:
    """Counts the failures in a row of one replica. A rest does not end by itself but in `end_rest`."""

    def __init__(self) -> None:
        self.rests_until: float | None = None
        """None: the breaker is closed, and the replica may get attempts."""
        self.on_change: Callable[[], None] | None = None
        """Called when the breaker may have opened or closed."""
        self._num_failures = 0
        self._last_failure_at = 0.0

    def note_failure(self, now: float) -> None:
        """An attempt failed there by the replica's own fault."""
        self._num_failures += 1
        self._last_failure_at = now
        if self._num_failures >= NUM_FAILURES_TO_REST:
            self.rest_until(now + self._rest_s)

    def note_success(self) -> None:
        """An attempt brought its first output there."""
        self._num_failures = 0
        if self.rests_until is not None:
            self._set(None)

    def note_sent(self, now: float) -> None:
        """After a rest one attempt probes the replica (half-open); others follow when it has brought output."""
        if self._num_failures >= NUM_FAILURES_TO_REST:
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
        if self._num_failures == 0:
            return self.rests_until is None or now >= self.rests_until
        return now - self._last_failure_at > MEMORY_S

    def _set(self, rests_until: float | None) -> None:
        self.rests_until = rests_until
        if self.on_change is not None:
            self.on_change()

    @property
    def _rest_s(self) -> float:
        num_rests = min(self._num_failures - NUM_FAILURES_TO_REST, 10)
        return min(FIRST_REST_S * 2.0**num_rests, MAX_REST_S)

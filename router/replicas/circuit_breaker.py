"""Whether a replica may get new attempts: one that fails again and again is left alone for a while, each time longer.

What may live here: counting, and until when. What may not: what counts as a failure (`dispatch.py`: only a replica's
own faults do, never a caller's mistake), clocks.
"""

from typing import Final

NUM_FAILURES_TO_REST: Final = 3
"""So many failures in a row, with no attempt in between that came to a token."""

FIRST_REST_S: Final = 1.0
MAX_REST_S: Final = 30.0
MEMORY_S: Final = 60.0
"""How long the failures of a replica that is gone are remembered, in case that it comes back under its name."""


class CircuitBreaker:
    """The failures in a row of one replica. A rest ends when `end_rest` is told the time, and not by itself."""

    def __init__(self) -> None:
        self.rests_until: float | None = None
        """None: it may get attempts."""
        self._num_failures = 0
        self._last_failure_at = 0.0

    def note_failure(self, now: float) -> None:
        """An attempt came to nothing there by the replica's own fault."""
        self._num_failures += 1
        self._last_failure_at = now
        if self._num_failures >= NUM_FAILURES_TO_REST:
            self.rest_until(now + self._rest_s)

    def note_success(self) -> None:
        """An attempt came to its first token there."""
        self._num_failures = 0
        self.rests_until = None

    def note_sent(self, now: float) -> None:
        """After a rest one attempt tries the replica out; others follow when it has come to a token."""
        if self._num_failures >= NUM_FAILURES_TO_REST:
            self.rest_until(now + self._rest_s)

    def rest_until(self, when: float) -> None:
        """No new attempts before `when`, nor before what was said earlier."""
        self.rests_until = when if self.rests_until is None else max(when, self.rests_until)

    def end_rest(self, now: float) -> None:
        """Ends a rest whose time is over."""
        if self.rests_until is not None and now >= self.rests_until:
            self.rests_until = None

    def is_forgotten(self, now: float) -> bool:
        """Whether it would be the same to start with a new one."""
        if self._num_failures == 0:
            return self.rests_until is None or now >= self.rests_until
        return now - self._last_failure_at > MEMORY_S

    @property
    def _rest_s(self) -> float:
        num_rests = min(self._num_failures - NUM_FAILURES_TO_REST, 10)
        return min(FIRST_REST_S * 2.0**num_rests, MAX_REST_S)

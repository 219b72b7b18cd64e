"""Retry policy of a client: which failures are retried, for how long, and with what pauses.

No clock and no randomness: time and draws are passed in. What may not live here: calls (`async_client.py`).
"""

from collections.abc import Callable
from typing import Final

import grpc

from holdfast.router.replicas.backoff import growing_pause_s
from holdfast.router.wire.statuses import CallStatus

MAX_PAUSE_S: Final = 2.0

_BROKEN_CODES: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
_BUG_CODES: Final = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}


def is_worth_another_try(status: CallStatus, *, was_taken: bool = False) -> bool:
    """Whether the same call may succeed at another router, or later: where a router, a replica or the way was lost.

    A full queue is for the caller to deal with, unless the request `was_taken`: some router has admitted it before. The
    codes of a bug count only without details, which a router always sends: then the connection itself broke.
    """
    if status.code in _BROKEN_CODES or (was_taken and status.code is grpc.StatusCode.RESOURCE_EXHAUSTED):
        return True
    return status.code in _BUG_CODES and status.details is None


class RetryPolicy:
    """The retries of one request. Each router is asked once without a pause; then pauses grow.

    Pauses have jitter, so that the clients of a lost router do not all come at the same time.
    """

    def __init__(
        self,
        *,
        num_routers: int,
        connect_s: float,
        reconnect_s: float,
        timeout_s: float | None,
        draw: Callable[[], float],
        now: float,
    ) -> None:
        """Retries end with the timeout, counted from now, or some time after the first of the failures in a row.

        That time is `connect_s` until a router has admitted the request, and `reconnect_s` from then on.
        """
        self._num_routers = num_routers
        self._limit_s = connect_s
        self._reconnect_s = reconnect_s
        self._deadline = None if timeout_s is None else now + timeout_s
        self._draw = draw
        self._first_failed_at: float | None = None
        self._num_failed = 0
        self.was_taken = False
        """Some router has admitted the request."""

    def note_taken(self) -> None:
        """A router has admitted the request. The time limit starts anew, but the pauses do not: routers that admit and
        lose it again and again are asked less and less often.
        """
        self.was_taken = True
        self._limit_s = self._reconnect_s
        self._first_failed_at = None

    def note_news(self) -> None:
        """A router has sent some of the answer."""
        if self._num_failed or not self.was_taken:
            self.note_taken()
            self._num_failed = 0

    def pause_s(self, now: float, hint_s: float | None = None) -> float | None:
        """A try has failed: how long to wait before the next, or None if there is no use in it.

        `hint_s` is what the router said of that; it counts once all have been asked.
        """
        if self._first_failed_at is None:
            self._first_failed_at = now
        self._num_failed += 1
        if self._num_failed < self._num_routers:
            return 0.0
        num_rounds = self._num_failed - self._num_routers
        pause_s = growing_pause_s(num_rounds, MAX_PAUSE_S, self._draw(), hint_s or 0.0)
        end = self._first_failed_at + self._limit_s
        return pause_s if now + pause_s < (end if self._deadline is None else min(end, self._deadline)) else None

    def time_left_s(self, now: float) -> float | None:
        """Of the request's own timeout; None if it has none."""
        return None if self._deadline is None else self._deadline - now

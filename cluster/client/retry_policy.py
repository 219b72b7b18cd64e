"""Retry policy of a client: which failures are retried, for how long, and with what pauses.

No clock and no randomness: time and draws are passed in.
"""

from collections.abc import Callable
from typing import Final

import grpc

from holdfast.router.dispatch.circuit_breaker import growing_pause_s
from holdfast.router.router_losses import MAX_ROUTERS_LOST
from holdfast.router.wire.statuses import CallStatus
from holdfast.worker.errors import RequestQuarantinedError

MAX_PAUSE_S: Final = 2.0

NEWS_S: Final = 15.0
"""Seconds by which the successor of a router that ended has reported to all routers what that one was reading."""

SERVED_S: Final = 10.0
"""A router that had a request for so long before it was lost has served it: its loss is the first of a new row."""

RECONNECT_S: Final = 120.0
"""Seconds that a client looks for a router after a loss, by default: more than twice the restart of a whole cluster on
a machine with ten times as much work as cores."""

_BROKEN_CODES: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
_BUG_CODES: Final = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}


def is_worth_another_try(status: CallStatus, *, was_taken: bool = False) -> bool:
    """Whether the same call may succeed at another router, or later: where a router, a replica or the way was lost.

    A full queue is for the caller to deal with, unless the request `was_taken`: some router has admitted it before. The
    codes of a bug count only without details, which a router always sends: then the connection itself broke. Once the
    request was taken, UNIMPLEMENTED without details is the answer of another program on the port of a lost router.
    """
    if status.code in _BROKEN_CODES or (was_taken and status.code is grpc.StatusCode.RESOURCE_EXHAUSTED):
        return True
    is_strange = was_taken and status.code is grpc.StatusCode.UNIMPLEMENTED
    return (status.code in _BUG_CODES or is_strange) and status.details is None


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
        sees_admission: bool = True,
    ) -> None:
        """Retries end with the timeout, counted from now, or some time after the first of the failures in a row.

        That time is `connect_s` until a router has got the request, and `reconnect_s` from then on. A row of failures
        ends with output, or with a router that was lost after it had served the request (`SERVED_S`). A router that
        admits a request and then reports that it cannot be served counts as a failure. Retries also end after
        `MAX_ROUTERS_LOST` routers in a row that ended while they were reading it. Where the client does not see when a
        router has read it (`sees_admission` False), it waits for so long then that routers know whether it may be sent.
        """
        self._num_routers = num_routers
        self._limit_s = connect_s
        self._reconnect_s = reconnect_s
        self._deadline = None if timeout_s is None else now + timeout_s
        self._draw = draw
        self._first_failed_at: float | None = None
        self._num_failed = 0
        self._sent_at = now
        self._is_router_gone = False
        self._sees_admission = sees_admission
        self._num_proofs = 0
        self._is_being_read = False
        self.was_taken = False
        """Some router has admitted the request, or was lost while it was reading it."""
        self.num_routers_lost = 0
        """Routers in a row that have ended while they were reading the request."""

    def note_sent(self) -> None:
        """The request is sent to a router, which begins to read it now and admits it when it has read all of it."""
        self._is_being_read = True

    def note_taken(self) -> None:
        """A router has admitted the request. Neither the time limit nor the pauses begin anew by that: routers that
        admit and lose it again and again are asked less and less often, up to a limit.
        """
        self.num_routers_lost = self._num_proofs = 0
        self._is_being_read = False
        self._note_reached()

    def note_router_lost(self, *, is_proof: bool = True) -> None:
        """The connection to the router that it was sent to broke, without a word.

        `is_proof`: a router was reading it when it ended. Raises `RequestQuarantinedError` after this many of these in
        a row, since the request is then considered the cause.
        """
        self.note_router_gone()
        if not self._is_being_read:
            return
        self._note_reached()
        self.num_routers_lost += 1
        self._num_proofs += is_proof
        if self._sees_admission and self._num_proofs >= MAX_ROUTERS_LOST:
            raise RequestQuarantinedError(
                f"{self._num_proofs} routers ended, one after the other, while they were reading this request; it is "
                "not sent again, since it may end all of them"
            )

    def note_suspected(self) -> None:
        """A router knows that another one was lost while it was reading the request, which looked unread from here."""
        self._note_reached()

    def note_router_gone(self) -> None:
        """Whether the router was lost or stops, as opposed to a router that has no replica for the request."""
        self._is_router_gone = True

    def _note_reached(self) -> None:
        if not self.was_taken:
            self.was_taken = True
            self._limit_s = self._reconnect_s
            self._first_failed_at = None

    def note_news(self) -> None:
        """A router has sent some of the answer."""
        if self._num_failed or not self.was_taken:
            self.note_taken()
            self._num_failed, self._first_failed_at = 0, None

    def pause_s(self, now: float, hint_s: float | None = None) -> float | None:
        """A try has failed: how long to wait before the next, or None if there is no use in it.

        `hint_s` is the router's retry time; it counts once all routers have been asked.
        """
        has_served = self._is_router_gone and now - self._sent_at >= SERVED_S
        if self._first_failed_at is None or has_served:
            self._first_failed_at = now
        self._is_router_gone = False
        self._num_failed += 1
        pause_s = self._next_pause_s(now, self._first_failed_at + self._limit_s, hint_s)
        self._sent_at = now + (pause_s or 0.0)
        return pause_s

    def _next_pause_s(self, now: float, end: float, hint_s: float | None) -> float | None:
        is_suspect = self._num_proofs >= MAX_ROUTERS_LOST
        if self._num_failed < self._num_routers and not is_suspect:
            return 0.0
        num_rounds = max(0, self._num_failed - self._num_routers)
        pause_s = growing_pause_s(num_rounds, MAX_PAUSE_S, self._draw(), hint_s or 0.0)
        if is_suspect:
            pause_s, self._num_proofs = pause_s + NEWS_S, MAX_ROUTERS_LOST - 1
        return pause_s if now + pause_s < (end if self._deadline is None else min(end, self._deadline)) else None

    def time_left_s(self, now: float) -> float | None:
        """Seconds left of the request's own timeout; None if there is none."""
        return None if self._deadline is None else self._deadline - now

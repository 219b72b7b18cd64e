"""States of an open request and their transitions, as a table without data.

                SEND      OUTPUT    CLEAR    GIVE_BACK  LOSE      SUSPECT  MOVE      SUSPEND    CONTINUE  FINISH
    QUEUED      SENT
    RETURNED    SENT
    RETRYING    SENT
    HELD        ON_TRIAL
    SENT                  RUNNING            RETURNED   RETRYING  HELD     SENT      SUSPENDED
    RUNNING               RUNNING            RETURNED   RETRYING  HELD     SENT      SUSPENDED            FINISHED
    ON_TRIAL              ON_TRIAL  RUNNING  HELD       HELD               ON_TRIAL                       FINISHED
    SUSPENDED                                                                                   RETURNED

From each of these FAIL leads to FAILED, CANCEL to CANCELLED, HAND_OVER to HANDED_OVER. Any other event is a bug in
Holdfast and raises `InternalError`.
"""

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Final


class RequestStatus(Enum):
    """The states of the machine."""

    QUEUED = "queued"
    """Waits for its first replica."""
    RETURNED = "returned"
    """Waits for another replica: the last one was full, or left while it was retiring; or it was suspended."""
    RETRYING = "retrying"
    """Waits for another replica because the last one failed: sending it again uses the retry budget."""
    HELD = "held"
    """A quarantine suspect that waits for its trial. That is a retry too, and uses the retry budget."""
    SENT = "sent"
    """Has an attempt without output yet."""
    RUNNING = "running"
    """Has an attempt with output."""
    ON_TRIAL = "on trial"
    """Has an attempt; if the replica crashes now, the request is the culprit."""
    SUSPENDED = "suspended"
    """Waits for its client to read the output; no replica runs it."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    HANDED_OVER = "handed over"
    """Is resumed by its client at another router."""

    @property
    def is_waiting(self) -> bool:
        """Whether it is in the queue."""
        return self in _WAITING

    @property
    def is_retry(self) -> bool:
        """Sending it again uses the retry budget."""
        return self in _RETRIES

    @property
    def has_attempt(self) -> bool:
        return self in _WITH_ATTEMPT


_WAITING: Final = {RequestStatus.QUEUED, RequestStatus.RETURNED, RequestStatus.RETRYING, RequestStatus.HELD}
_RETRIES: Final = {RequestStatus.RETRYING, RequestStatus.HELD}
_WITH_ATTEMPT: Final = {RequestStatus.SENT, RequestStatus.RUNNING, RequestStatus.ON_TRIAL}


class Standing(IntEnum):
    """Why a request is in the queue. Within a priority class, the smaller goes first."""

    RETURNED = 0
    RESUMED = 1
    ARRIVED = 2


class RequestEvent(Enum):
    """Events of an open request."""

    SEND = "send"
    """Leaves the queue for a replica."""
    OUTPUT = "output"
    """Its attempt has output."""
    CLEAR = "clear"
    """Its attempt has run for enough steps: it is no longer a suspect."""
    GIVE_BACK = "give back"
    """Its attempt ended without a fault: the replica was full, or left while it was retiring."""
    LOSE = "lose"
    """Its attempt failed because of its replica."""
    SUSPECT = "suspect"
    """Its replica crashed, which makes it a quarantine suspect."""
    MOVE = "move"
    """Another replica continues it without a wait in the queue."""
    SUSPEND = "suspend"
    """Its client does not read: its attempt is taken back."""
    CONTINUE = "continue"
    """Its client has read all output: it waits for a replica again."""
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"
    HAND_OVER = "hand over"


_ENDS: Final = {
    RequestEvent.FAIL: RequestStatus.FAILED,
    RequestEvent.CANCEL: RequestStatus.CANCELLED,
    RequestEvent.HAND_OVER: RequestStatus.HANDED_OVER,
}
_RUNS: Final = {
    RequestEvent.OUTPUT: RequestStatus.RUNNING,
    RequestEvent.GIVE_BACK: RequestStatus.RETURNED,
    RequestEvent.LOSE: RequestStatus.RETRYING,
    RequestEvent.SUSPECT: RequestStatus.HELD,
    RequestEvent.MOVE: RequestStatus.SENT,
    RequestEvent.SUSPEND: RequestStatus.SUSPENDED,
}
TRANSITIONS: Final[Mapping[RequestStatus, Mapping[RequestEvent, RequestStatus]]] = {
    RequestStatus.QUEUED: {RequestEvent.SEND: RequestStatus.SENT, **_ENDS},
    RequestStatus.RETURNED: {RequestEvent.SEND: RequestStatus.SENT, **_ENDS},
    RequestStatus.RETRYING: {RequestEvent.SEND: RequestStatus.SENT, **_ENDS},
    RequestStatus.HELD: {RequestEvent.SEND: RequestStatus.ON_TRIAL, **_ENDS},
    RequestStatus.SENT: {**_RUNS, **_ENDS},
    RequestStatus.RUNNING: {**_RUNS, RequestEvent.FINISH: RequestStatus.FINISHED, **_ENDS},
    RequestStatus.ON_TRIAL: {
        RequestEvent.OUTPUT: RequestStatus.ON_TRIAL,
        RequestEvent.CLEAR: RequestStatus.RUNNING,
        RequestEvent.GIVE_BACK: RequestStatus.HELD,
        RequestEvent.LOSE: RequestStatus.HELD,
        RequestEvent.MOVE: RequestStatus.ON_TRIAL,
        RequestEvent.FINISH: RequestStatus.FINISHED,
        **_ENDS,
    },
    RequestStatus.SUSPENDED: {RequestEvent.CONTINUE: RequestStatus.RETURNED, **_ENDS},
    RequestStatus.FINISHED: {},
    RequestStatus.FAILED: {},
    RequestStatus.CANCELLED: {},
    RequestStatus.HANDED_OVER: {},
}

"""Statistics of the dispatcher: waits by class, failovers, pauses and tokens that were sent again. Plain counts.

What may live here: counting at the beginning and the end of an attempt, never at a token. What may not: decisions,
clocks, how figures are published (`router/metrics/`).
"""

from collections import Counter, defaultdict
from typing import Final

from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_status import RequestEvent
from holdfast.router.dispatch.timeline import AttemptTimes, Cause
from holdfast.worker.histogram import Histogram

_CAUSES: Final = {
    RequestEvent.LOSE: Cause.LOST,
    RequestEvent.SUSPECT: Cause.LOST,
    RequestEvent.GIVE_BACK: Cause.RETURNED,
    RequestEvent.MOVE: Cause.MOVED,
    RequestEvent.SUSPEND: Cause.UNREAD,
}
IN_ROUTER: Final = "router"
IN_REPLICA: Final = "replica"


class DispatchStats:
    """Of all requests of one router, since its start. Classes are those that the requests came with."""

    def __init__(self) -> None:
        self.queue_s: defaultdict[tuple[str, str, str], Histogram] = defaultdict(Histogram)
        """Waits by model, class and place: in the router until the first replica, in the replica until it first ran."""
        self.failovers: Counter[tuple[str, str]] = Counter()
        """Requests that were sent to a replica once more, by model and by why the last one has ended."""
        self.replayed_tokens: Counter[str] = Counter()
        """Output tokens that were sent along, to be continued after, by model."""
        self.pause_s: defaultdict[str, Histogram] = defaultdict(Histogram)
        """From the end of an attempt that had output to the first output of the next one, by model."""
        self.suspended: Counter[str] = Counter()
        """Requests whose replica was given to others because their clients did not read, by model."""
        self.replicas_lost: Counter[str] = Counter()
        """Replicas whose links were lost while they were up and not leaving, by model."""

    def note_sent(self, state: RequestState, replica_id: str, now: float) -> None:
        """An attempt begins."""
        attempts, num_tokens = state.timeline.attempts, len(state.output_token_ids)
        if attempts:
            cause = attempts[-1].cause
            assert cause is not None, "one attempt ends before the next begins"
            if cause is not Cause.UNREAD:
                self.failovers[state.model, str(cause)] += 1
        else:
            waited_s = now - state.timeline.opened_s
            self.queue_s[state.model, _class_of(state), IN_ROUTER].note(waited_s)
        if num_tokens:
            self.replayed_tokens[state.model] += num_tokens
        attempts.append(AttemptTimes(replica_id, now, num_tokens))

    def note_first_output(self, state: RequestState, queued_s: float, now: float) -> None:
        """An attempt has brought its first output, before which it has waited so long in its replica."""
        *earlier, attempt = state.timeline.attempts
        attempt.first_output_s, attempt.queued_s = now, queued_s
        self.queue_s[state.model, _class_of(state), IN_REPLICA].note(queued_s)
        had_output = [one for one in earlier if one.first_output_s is not None]
        if had_output and had_output[-1].ended_s is not None and earlier[-1].cause is not Cause.UNREAD:
            self.pause_s[state.model].note(now - had_output[-1].ended_s)

    def note_taken_back(self, state: RequestState, event: RequestEvent, now: float) -> None:
        """An attempt has ended, and its request has not."""
        attempt = state.timeline.attempts[-1]
        attempt.ended_s, attempt.cause = now, _CAUSES[event]
        self.suspended[state.model] += event is RequestEvent.SUSPEND


def _class_of(state: RequestState) -> str:
    return state.request.priority.name.lower()

"""Statistics of the dispatcher: waits, first tokens, failovers, pauses, replayed tokens, outcomes by version.

All are counted at the beginning, the first output and the end of an attempt, never at a token. No clocks, no decisions.
"""

from collections import Counter, defaultdict, deque
from typing import Final

from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_status import RequestEvent
from holdfast.router.dispatch.timeline import AttemptTimes, Cause
from holdfast.router.dispatch.versions import VersionCounts
from holdfast.worker.request import Priority
from holdfast.worker.step_update import Histogram

_CAUSES: Final = {
    RequestEvent.LOSE: Cause.LOST,
    RequestEvent.SUSPECT: Cause.LOST,
    RequestEvent.GIVE_BACK: Cause.RETURNED,
    RequestEvent.MOVE: Cause.MOVED,
    RequestEvent.SUSPEND: Cause.UNREAD,
}
_CLASSES: Final = {priority: priority.name.lower() for priority in Priority}
IN_ROUTER: Final = "router"
IN_REPLICA: Final = "replica"


RECENT_S: Final = 30.0
NUM_RECENT: Final = 512
SHARE: Final = 0.9  # quantile that is reported


class FirstTokens:
    """Counts of one model: requests that came, requests with a first token, and how soon.

    A request that goes on after tokens of another router, or of a replica that was lost, has had its first token.
    """

    def __init__(self) -> None:
        self.num_arrived = 0
        self.num_first_tokens = 0
        self.num_left = 0
        """Arrivals whose clients left before the first token, and wait for none here."""
        self._recent = deque[tuple[float, float]](maxlen=NUM_RECENT)

    def note(self, opened_s: float, now: float) -> None:
        """A request that came at `opened_s` has its first token."""
        self.num_first_tokens += 1
        self._recent.append((now, now - opened_s))

    def ttft_s(self, now: float) -> float:
        """The 90th percentile of the time to first token over recent requests, in seconds; 0 without any."""
        while self._recent and self._recent[0][0] < now - RECENT_S:
            self._recent.popleft()
        ordered = sorted(ttft_s for _, ttft_s in self._recent)
        return ordered[int(SHARE * (len(ordered) - 1))] if ordered else 0.0


class DispatchStats:
    """Counts of all requests of one router since its start, by the class of each request."""

    def __init__(self) -> None:
        self.queue_s: defaultdict[tuple[str, str, str], Histogram] = defaultdict(Histogram)
        """Waits by model, class and place: in the router until the first replica, in the replica until it first ran."""
        self.failovers: Counter[tuple[str, str]] = Counter()
        """Requests that were sent to a replica once more, by model and by why the last one has ended."""
        self.replayed_tokens: Counter[str] = Counter()
        """Output tokens that were sent along, to be continued after, by model."""
        self.pause_s: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Seconds from the end of an attempt with output to the first output of the next one, by model."""
        self.suspended: Counter[str] = Counter()
        """Requests whose replica was given to others because their clients did not read, by model."""
        self.replicas_lost: Counter[str] = Counter()
        """Replicas whose links were lost while they were up and not leaving, by model."""

        self.first_tokens: defaultdict[str, FirstTokens] = defaultdict(FirstTokens)
        """First tokens by model."""
        self.versions: dict[tuple[str, str], VersionCounts] = {}
        """Outcomes of attempts, by model and version."""

    def version(self, model: str, version: str) -> VersionCounts:
        """The counts of one version of a model."""
        counts = self.versions.get((model, version))
        if counts is None:
            counts = self.versions[model, version] = VersionCounts(model=model, version=version)
        return counts

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
            self.queue_s[state.model, _CLASSES[state.request.priority], IN_ROUTER].note(waited_s)
        if num_tokens:
            self.replayed_tokens[state.model] += num_tokens
        attempts.append(AttemptTimes(replica_id, now, num_tokens))

    def note_first_output(self, state: RequestState, queued_s: float, now: float) -> None:
        """An attempt has brought its first output, before which it has waited so long in its replica."""
        assert state.attempt is not None, "output comes of an attempt"
        if not state.has_first_token:
            state.has_first_token = True
            self.first_tokens[state.model].note(state.timeline.opened_s, now)
        counts = self.version(state.model, state.attempt.replica.version)
        counts.num_first_tokens += 1
        counts.first_token_s += now - state.attempt.sent_at
        *earlier, attempt = state.timeline.attempts
        attempt.first_output_s, attempt.queued_s = now, queued_s
        self.queue_s[state.model, _CLASSES[state.request.priority], IN_REPLICA].note(queued_s)
        if earlier:
            self._note_pause(state, earlier, now)

    def _note_pause(self, state: RequestState, earlier: list[AttemptTimes], now: float) -> None:
        had_output = [one for one in earlier if one.first_output_s is not None]
        if had_output and had_output[-1].ended_s is not None and earlier[-1].cause is not Cause.UNREAD:
            self.pause_s[state.model].note(now - had_output[-1].ended_s)

    def note_taken_back(self, state: RequestState, event: RequestEvent, now: float) -> None:
        """An attempt has ended, and its request has not."""
        attempt = state.timeline.attempts[-1]
        attempt.ended_s, attempt.cause = now, _CAUSES[event]
        self.suspended[state.model] += event is RequestEvent.SUSPEND

"""Admitted requests of a router, and their statistics: how they ended, their tokens, and how long they took."""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from holdfast.router.dispatch.request_stream import OutputStream
from holdfast.router.dispatch.timeline import Phases, Timeline, longest
from holdfast.router.events import ModelStatus
from holdfast.router.generation import OutputDelta
from holdfast.router.overload.byte_ledger import Lease
from holdfast.router.security.gate import ANYONE, Caller
from holdfast.router.text.head_lines import HeadLine
from holdfast.router.text.text_stream import TextStream
from holdfast.worker.errors import (
    AuthenticationError,
    CallerError,
    CapacityError,
    DeadlineExceededError,
    HoldfastError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
    ReplicaError,
    RequestAbortedError,
    RequestSupersededError,
)
from holdfast.worker.request import EngineRequest
from holdfast.worker.step_update import TOKEN_TIMES_S, Histogram

CANCELLED: Final = "cancelled"
"""The client has left."""

_OUTCOMES: Final[dict[type[HoldfastError], str]] = {
    AuthenticationError: "denied",
    PermissionDeniedError: "denied",
    CallerError: "invalid",
    RateLimitError: "rate_limit",
    OverloadedError: "overload",
    CapacityError: "capacity",
    ReplicaError: "unavailable",
    DeadlineExceededError: "deadline",
    RequestAbortedError: "handed_over",
    RequestSupersededError: CANCELLED,
    HoldfastError: "internal",
}


def outcome_of(error: BaseException) -> str:
    """The name of a request's ending."""
    if not isinstance(error, HoldfastError):
        return "internal" if isinstance(error, Exception) else CANCELLED
    return next(_OUTCOMES[one] for one in type(error).__mro__ if one in _OUTCOMES)


@dataclass(slots=True)
class ModelStats:
    """Statistics of the requests for one model."""

    outcomes: Counter[str] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    first_token_s: Histogram = field(default_factory=Histogram)
    output_token_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_TIMES_S))
    """Between output tokens of one request: their mean."""
    duration_s: Histogram = field(default_factory=Histogram)
    reader_wait_s: Histogram = field(default_factory=Histogram)
    num_slow: int = 0
    """Counted by `SlowRequests`, which logs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """Facts about one request when it is over. Times are in seconds of the router's clock."""

    request: EngineRequest
    model: str
    outcome: str
    num_output_tokens: int
    began_s: float
    first_token_s: float | None
    """When it came; None: none has."""
    ended_s: float
    phases: Phases
    reader_wait_s: float
    """Seconds that its output waited for its reader; this is part of no phase, and may overlap decode."""
    timeline: Timeline
    """Timeline of its sequence with the most attempts."""
    head_lines: Sequence[HeadLine] = ()
    """Lines at the head of its prompt that may spoil it for the cache."""

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.began_s

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def priority(self) -> str:
        """Name of its class in logs and traces."""
        return self.request.priority.name.lower()


class EndListener(Protocol):
    """Hears of each request that was admitted, when it is over. Must not raise."""

    def __call__(self, ended: EndedRequest) -> None: ...


class RequestStats:
    """All figures of one router."""

    def __init__(self) -> None:
        self.models: defaultdict[str, ModelStats] = defaultdict(ModelStats)
        self.on_end: list[EndListener] = []
        """Hear of each request that was admitted, when it is over."""

    def refused(self, error: BaseException) -> None:
        """A request that did not get as far as a model that is served here."""
        self.models[""].outcomes[outcome_of(error)] += 1


class AdmittedRequest:
    """One request of this router, from its admission to its end: the engine request, and beside it the router's data
    about its client and its counts. It hears of each stream's first tokens and its end.
    """

    def __init__(
        self,
        request: EngineRequest,
        model: ModelStatus,
        stats: RequestStats,
        now: Callable[[], float],
        *,
        caller: Caller = ANYONE,
        deadline: float = math.inf,
        client_attempt: int = 0,
        echo: str = "",
        texts: Sequence[TextStream] = (),
    ) -> None:
        """Starts now, by a clock in seconds. `client_attempt`: above 0 if the client submits again after a retryable
        error.
        """
        self.request = request
        self.model = model.name
        self.named_model = model.name if request.adapter is None else request.adapter.name
        """Name that the client knows: the adapter's, if it runs with one."""
        self.facts = model.facts
        self._caller = caller
        self.deadline = deadline
        self.client_attempt = client_attempt
        self.echo = echo
        """The prompt's text if the request asks for `echo`; else empty."""
        self.texts = texts
        """Texts of its sequences, by index."""
        self.head_lines: Sequence[HeadLine] = ()
        """Lines at the head of its prompt that may spoil it for the cache."""
        self.lease: Lease | None = None
        """Holds its unread output."""
        self.is_open = False
        """Whether it can be aborted from outside."""
        self._stats = stats
        self._now = now
        self._began_at = now()
        self._first_at: float | None = None
        self._last_at: float | None = None
        self._num_first = 0
        self.num_tokens = 0
        """Output tokens of all sequences; to be set before the end."""
        self.timelines: Sequence[Timeline] = ()
        """Timelines of all sequences; to be set before the end."""
        self.reader_wait_s = 0.0
        """Seconds of waiting for the reader; to be set before the end."""
        self.is_over = False
        """Whether its output was read to the end; to be set before the end."""
        self._reason = "stop"
        self.on_first_token: Callable[[], None] | None = None
        """Called once, when the first token comes."""
        self.on_end: EndListener | None = None
        """Hears of this request's end, before all others do."""

    def note(self, delta: OutputDelta) -> None:
        """The first tokens of one of its sequences, or its end."""
        if self._first_at is None and delta.token_ids:
            self._first_at, self._num_first = self._now(), len(delta.token_ids)
            if self.on_first_token is not None:
                self.on_first_token()
        if delta.finish_reason is not None:
            self._reason, self._last_at = str(delta.finish_reason), self._now()

    def note_read(self, streams: Iterable[OutputStream]) -> None:
        """Outcome of the request, by its sequences' streams, after their last read."""
        self.timelines = timelines = list[Timeline]()
        for stream in streams:
            self.num_tokens += stream.num_tokens
            self.reader_wait_s = max(self.reader_wait_s, stream.behind_s)
            timelines.append(stream.timeline)

    def end(self, error: BaseException | None = None) -> None:
        """The request has ended, by an error or not; where it is not over, because its client has left."""
        is_complete = error is None and self.is_over
        stats, now = self._stats.models[self.model], self._now()
        if self._caller.rates is not None:
            self._caller.took_tokens(self.num_tokens, now)
        outcome = outcome_of(error) if error is not None else self._reason if self.is_over else CANCELLED
        stats.outcomes[outcome] += 1
        stats.num_prompt_tokens += len(self.request.prompt_token_ids)
        stats.num_output_tokens += self.num_tokens
        if self._first_at is not None:
            stats.first_token_s.note(self._first_at - self._began_at)
            stats.reader_wait_s.note(self.reader_wait_s)
            if self.num_tokens > self._num_first:
                stats.output_token_s.note((now - self._first_at) / (self.num_tokens - self._num_first))
            if is_complete:
                stats.duration_s.note(now - self._began_at)
        if self.on_end is not None or self._stats.on_end:
            self._tell(outcome, now, is_complete=is_complete)

    def _tell(self, outcome: str, now: float, *, is_complete: bool) -> None:
        timelines = self.timelines
        longer = timelines[0] if len(timelines) == 1 else longest(timelines)
        timeline = longer or Timeline(self._began_at)
        ended = EndedRequest(
            request=self.request,
            model=self.model,
            outcome=outcome,
            num_output_tokens=self.num_tokens,
            began_s=self._began_at,
            first_token_s=self._first_at,
            ended_s=now,
            phases=timeline.phases(self._last_at if is_complete and self._last_at is not None else now),
            reader_wait_s=self.reader_wait_s,
            timeline=timeline,
            head_lines=self.head_lines,
        )
        if self.on_end is not None:
            self.on_end(ended)
        for listener in self._stats.on_end:
            listener(ended)


logger = logging.getLogger(__name__)


class SlowRequests:
    """Called with each request when it is over."""

    def __init__(self, slow_s: float, stats: RequestStats) -> None:
        """Slow is what took at least `slow_s` seconds, however it ended."""
        self._slow_s = slow_s
        self._stats = stats

    def __call__(self, ended: EndedRequest) -> None:
        if ended.duration_s < self._slow_s:
            return
        self._stats.models[ended.model].num_slow += 1
        times = where_its_time_went(ended)
        message = ", ".join(
            f"{name.removesuffix('_s').replace('_', ' ')} {seconds:.2f} s" for name, seconds in times.items()
        )
        logger.warning(
            "request %s of model %s was slow (%s after %.2f s): %s; %d prompt and %d output tokens, replicas %s",
            ended.request.request_id,
            ended.model,
            ended.outcome,
            ended.duration_s,
            message,
            ended.num_prompt_tokens,
            ended.num_output_tokens,
            ", ".join(one.replica_id for one in ended.timeline.attempts) or "none",
            extra={"details": details(ended) | {name: round(seconds, 6) for name, seconds in times.items()}},
        )


def where_its_time_went(ended: EndedRequest) -> dict[str, float]:
    """Seconds by phase. Waiting for the reader may overlap with decode; the other phases follow each other."""
    phases = ended.phases
    return {
        "queue_s": phases.queue_s,
        "replica_queue_s": phases.replica_queue_s,
        "prefill_s": phases.prefill_s,
        "decode_s": phases.decode_s,
        "failover_s": phases.failover_s,
        "suspended_s": phases.suspended_s,
        "reader_s": ended.reader_wait_s,
    }


def details(ended: EndedRequest) -> dict[str, str | float | list[str]]:
    """Fields of a log line in JSON."""
    return {
        "request_id": ended.request.request_id,
        "model": ended.model,
        "priority": ended.priority,
        "outcome": ended.outcome,
        "duration_s": round(ended.duration_s, 6),
        "num_prompt_tokens": ended.num_prompt_tokens,
        "num_output_tokens": ended.num_output_tokens,
        "num_failovers": ended.timeline.num_failovers,
        "replicas": [one.replica_id for one in ended.timeline.attempts],
    }

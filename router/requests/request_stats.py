"""Statistics of a router's requests: how they ended, their tokens, and how long they took. Plain counts of one router.

What may not live here: clocks (the time is passed in), how figures are published (`router/doors/http/metrics.py`).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from holdfast.router.events import Deliver
from holdfast.worker.errors import (
    AuthenticationError,
    CallerError,
    CapacityError,
    DeadlineExceededError,
    HoldfastError,
    PermissionDeniedError,
    RateLimitError,
    ReplicaError,
    RequestAbortedError,
    RequestSupersededError,
)

CANCELLED: Final = "cancelled"
"""The client has left."""

_OUTCOMES: Final[dict[type[HoldfastError], str]] = {
    AuthenticationError: "denied",
    PermissionDeniedError: "denied",
    CallerError: "invalid",
    RateLimitError: "rate_limit",
    CapacityError: "capacity",
    ReplicaError: "unavailable",
    DeadlineExceededError: "deadline",
    RequestAbortedError: "handed_over",
    RequestSupersededError: CANCELLED,
    HoldfastError: "internal",
}

TIMES_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_TIMES_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


def outcome_of(error: BaseException) -> str:
    """The word for what has ended a request."""
    if not isinstance(error, HoldfastError):
        return "internal" if isinstance(error, Exception) else CANCELLED
    return next(_OUTCOMES[one] for one in type(error).__mro__ if one in _OUTCOMES)


class Histogram:
    """Counts of values up to each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bound, and of all that are above; not cumulative."""
        self.total = 0.0

    def note(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class ModelStats:
    """Of the requests for one model."""

    outcomes: Counter[str] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    first_token_s: Histogram = field(default_factory=lambda: Histogram(TIMES_S))
    output_token_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_TIMES_S))
    """Between output tokens of one request: their mean."""
    duration_s: Histogram = field(default_factory=lambda: Histogram(TIMES_S))


class RequestStats:
    """All figures of one router."""

    def __init__(self) -> None:
        self.models: dict[str, ModelStats] = {}

    def refused(self, error: BaseException) -> None:
        """A request that did not get as far as a model that is served here."""
        self.of("").outcomes[outcome_of(error)] += 1

    def of(self, model: str) -> ModelStats:
        if model not in self.models:
            self.models[model] = ModelStats()
        return self.models[model]


class RequestWatch:
    """One open request. It hears of each stream's first tokens and its end, and is told the number of tokens."""

    def __init__(self, stats: ModelStats, num_prompt_tokens: int, now: Callable[[], float], began_at: float) -> None:
        self._stats = stats
        self._num_prompt_tokens = num_prompt_tokens
        self._now = now
        self._began_at = began_at
        self._first_at: float | None = None
        self._num_first = 0
        self.num_tokens = 0
        """Of all sequences; to be set before the end."""
        self._reason = "stop"
        self.on_first_token: Callable[[], None] = _nothing
        """Called once, when the first token comes."""

    def note(self, delivery: Deliver) -> None:
        """The first tokens of one of its sequences, or its end."""
        if self._first_at is None and delivery.token_ids:
            self._first_at, self._num_first = self._now(), len(delivery.token_ids)
            self.on_first_token()
        if delivery.finish_reason is not None:
            self._reason = str(delivery.finish_reason)

    def end(self, error: BaseException | None = None, *, is_over: bool = True) -> None:
        """The request has ended, by an error or not; where it is not over, because its client has left."""
        stats, now = self._stats, self._now()
        outcome = outcome_of(error) if error is not None else self._reason if is_over else CANCELLED
        stats.outcomes[outcome] += 1
        stats.num_prompt_tokens += self._num_prompt_tokens
        stats.num_output_tokens += self.num_tokens
        if self._first_at is None:
            return
        stats.first_token_s.note(self._first_at - self._began_at)
        if self.num_tokens > self._num_first:
            stats.output_token_s.note((now - self._first_at) / (self.num_tokens - self._num_first))
        if error is None and is_over:
            stats.duration_s.note(now - self._began_at)


def _nothing() -> None:
    pass


@contextmanager
def watching(watch: RequestWatch) -> Iterator[list[bool]]:
    """Ends the watch with the context, in whichever way it is left. In the list it may be said whether it was over."""
    is_over: list[bool] = []
    try:
        yield is_over
    except BaseException as error:
        watch.end(error)
        raise
    watch.end(is_over=all(is_over))

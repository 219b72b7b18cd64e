"""Traces of attempts in a replica: spans for their queue, prefill and decode, below the span of their request.

One for each link, on its event loop. Only attempts that come with a trace context are followed, and of them only the
first output and the end. The tracer is made by the code that starts the link; without one nothing here runs.
"""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from holdfast.worker.request import EngineRequest, TokenDelta
from holdfast.worker.step_update import StepUpdate
from holdfast.worker.timers import WallClock

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

TRACEPARENT: Final = "traceparent"


@dataclass(slots=True)
class _Followed:
    context: Any
    """OpenTelemetry's, of the request's span."""
    began_s: float
    num_prompt_tokens: int
    num_tokens: int
    """Tokens of its output so far."""
    first_s: float | None = None


class LinkTraces:
    """Follows the traced attempts of one link."""

    def __init__(self, tracer: "Tracer", replica_id: str, now: Callable[[], float] | None = None) -> None:
        """`now` is in seconds since the epoch, without jumps."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._replica_id = replica_id
        self._now = now or WallClock(time.time(), time.monotonic)
        self._propagator = TraceContextTextMapPropagator()
        self._followed: dict[Hashable, _Followed] = {}
        self._waiting: set[Hashable] = set()
        """Followed requests without output."""

    def submitted(self, attempt: Hashable, request: EngineRequest) -> None:
        """A request has come; it is followed if its router traces it."""
        if request.traceparent:
            context = self._propagator.extract({TRACEPARENT: request.traceparent})
            num_prompt_tokens, num_tokens = len(request.prompt_token_ids), len(request.output_token_ids)
            self._waiting.add(attempt)
            self._followed[attempt] = _Followed(context, self._now(), num_prompt_tokens, num_tokens)

    def note_sent(self, update: StepUpdate) -> None:
        """An update that goes up the link."""
        if not self._followed:
            return
        for delta in update.deltas:
            if delta.finish_reason is not None or delta.attempt in self._waiting:
                self._note(delta)
        for rejection in update.rejections:
            self._waiting.discard(rejection.attempt)
            self._followed.pop(rejection.attempt, None)

    def _note(self, delta: TokenDelta) -> None:
        one = self._followed.get(delta.attempt)
        if one is None:
            return
        now = self._now()
        if one.first_s is None and delta.token_ids:
            self._waiting.discard(delta.attempt)
            one.first_s, ran_s = now, min(now, one.began_s + delta.queued_s)
            self._span("holdfast.replica.queue", one, one.began_s, ran_s)
            self._span("holdfast.replica.prefill", one, ran_s, now)
        if delta.finish_reason is not None:
            self._waiting.discard(delta.attempt)
            del self._followed[delta.attempt]
            one.num_tokens = delta.first_token_index + len(delta.token_ids)
            if one.first_s is not None:
                self._span("holdfast.replica.decode", one, one.first_s, now)

    def _span(self, name: str, one: _Followed, began_s: float, ended_s: float) -> None:
        attributes: dict[str, str | int] = {
            "holdfast.replica": self._replica_id,
            "holdfast.prompt_tokens": one.num_prompt_tokens,
            "holdfast.output_tokens": one.num_tokens,
        }
        span = self._tracer.start_span(name, one.context, attributes=attributes, start_time=round(1e9 * began_s))
        span.end(round(1e9 * ended_s))

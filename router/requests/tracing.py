"""Traces of requests: one OpenTelemetry span for each, and below it spans for its phases, made when it is over.

The tracer is made by the code that starts the router; without one nothing here runs. A caller's W3C `traceparent`
belongs to the task of its request, as a context variable, like the caller itself.
"""

import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from holdfast.router.requests.request_stats import EndedRequest

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

TRACEPARENT: Final = "traceparent"
"""The name of the header, and of the metadata."""

_INCOMING: Final[ContextVar[str]] = ContextVar("holdfast_traceparent", default="")


def note_incoming(traceparent: str) -> None:
    """Notes the `traceparent` of this task's caller; empty: none."""
    if traceparent:
        _INCOMING.set(traceparent)


class RequestTrace:
    """The trace of one open request that is sampled."""

    def __init__(self, tracer: "Tracer", span: "Span", began_ns: int, traceparent: str, offset_s: float) -> None:
        """`offset_s`: of the wall clock from the router's when the request began; a jump since then changes nothing."""
        self._tracer = tracer
        self._span = span
        self._began_ns = began_ns
        self.traceparent = traceparent
        """Parent of its replicas' spans."""
        self._offset_s = offset_s

    def __call__(self, ended: EndedRequest) -> None:
        """The end of the request: makes the spans of its phases, and ends its own."""
        from opentelemetry import trace

        def at(moment_s: float) -> int:
            # A loop's clock may count in milliseconds, and no phase begins before its request.
            return max(self._began_ns, round(1e9 * (moment_s + self._offset_s)))

        context, figures = trace.set_span_in_context(self._span), ended.timeline.figures(ended.ended_s)
        for name, began_s, ended_s, attributes in phase_spans(ended):
            self._tracer.start_span(name, context, attributes=attributes, start_time=at(began_s)).end(at(ended_s))
        self._span.set_attributes(
            {
                "holdfast.outcome": ended.outcome,
                "gen_ai.usage.input_tokens": ended.num_prompt_tokens,
                "gen_ai.usage.output_tokens": ended.num_output_tokens,
                "holdfast.tokens.memory": ended.timeline.num_cached_tokens - figures.num_disk_tokens,
                "holdfast.tokens.disk": figures.num_disk_tokens,
                "holdfast.tokens.computed": ended.num_prompt_tokens - ended.timeline.num_cached_tokens,
                "holdfast.tokens.drafted": figures.num_draft_tokens,
                "holdfast.tokens.accepted": figures.num_accepted_tokens,
                "holdfast.attempts": figures.num_attempts,
                "holdfast.failovers": ended.timeline.num_failovers,
                "holdfast.reader_wait_s": ended.reader_wait_s,
            }
        )
        if ended.outcome in ("internal", "unavailable", "deadline"):
            self._span.set_status(trace.StatusCode.ERROR, ended.outcome)
        self._span.end(at(ended.ended_s))


class RequestTracer:
    """Begins the traces of one router's requests."""

    def __init__(self, tracer: "Tracer", now: Callable[[], float]) -> None:
        """`now` is the clock of the requests' times."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._now = now
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, request_id: str, model: str) -> RequestTrace | None:
        """Trace of a request that was admitted now; None if it is not sampled."""
        from opentelemetry import trace

        parent = self._propagator.extract({TRACEPARENT: _INCOMING.get()})
        attributes = {"holdfast.request_id": request_id, "gen_ai.request.model": model}
        kind, began_ns = trace.SpanKind.SERVER, time.time_ns()
        offset_s = began_ns / 1e9 - self._now()
        span = self._tracer.start_span("holdfast.request", parent, kind, attributes, start_time=began_ns)
        if not span.is_recording():
            return None
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, trace.set_span_in_context(span))
        return RequestTrace(self._tracer, span, began_ns, carrier[TRACEPARENT], offset_s)


def phase_spans(ended: EndedRequest) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Name, beginning, end and attributes of each, in seconds of the router's clock, in order."""
    timeline = ended.timeline
    if not timeline.attempts:
        yield "holdfast.queue", timeline.opened_s, ended.ended_s, {}
        return
    yield "holdfast.queue", timeline.opened_s, timeline.attempts[0].sent_s, {"holdfast.priority": ended.priority}
    lost_s: float | None = None
    for attempt in timeline.attempts:
        attributes = {"holdfast.replica": attempt.replica_id, "holdfast.tokens_before": attempt.num_tokens}
        until_s = ended.ended_s if attempt.ended_s is None else attempt.ended_s
        ready_s = until_s if attempt.first_output_s is None else attempt.first_output_s
        if lost_s is None:
            yield "holdfast.prefill", attempt.sent_s, ready_s, attributes | {"holdfast.queued_s": attempt.queued_s}
        else:
            yield "holdfast.failover", lost_s, ready_s, attributes
        if attempt.first_output_s is not None:
            yield "holdfast.decode", attempt.first_output_s, until_s, attributes
        lost_s = until_s

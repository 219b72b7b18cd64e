"""Traces: one tree of spans from the client's own down to the replica's, also where a request goes on elsewhere."""

import re

import httpx2
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.serve.member_process import tracer_provider
from holdfast.worker.config import TelemetryConfig
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.replica.link_traces import LinkTraces
from holdfast.worker.request import EngineLoad, EngineRequest, FinishReason, TokenDelta
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import StepUpdate
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.site import site

CALLERS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = f"{CALLERS[:-2]}00"


class Traced:
    """A tracer, and the spans that have ended."""

    def __init__(self, sampler: object = None) -> None:
        self.provider = TracerProvider(sampler=sampler)
        self._exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    @property
    def spans(self) -> dict[str, list]:
        """By name, each in order."""
        found: dict[str, list] = {}
        for span in sorted(self._exporter.get_finished_spans(), key=lambda one: one.start_time):
            found.setdefault(span.name, []).append(span)
        return found


async def asked(place, traceparent: str = "") -> None:
    body = {"model": "fake", "prompt": "hello", "max_tokens": 3, "seed": 1}
    async with httpx2.AsyncClient() as client:
        url = f"http://{place.router.http_address}/v1/completions"
        headers = {"traceparent": traceparent} if traceparent else {}
        answer = await client.post(url, json=body, headers=headers)
    assert answer.status_code == 200


@on_a_loop
async def test_a_request_over_http_is_a_child_of_its_callers_span_and_so_are_its_replicas():
    traced, replica = Traced(), await FakeReplica.start("one")
    async with site(replica, http=True, tracer=traced.tracer) as place:
        await asked(place, CALLERS)
    spans = traced.spans
    assert sorted(spans) == ["holdfast.decode", "holdfast.prefill", "holdfast.queue", "holdfast.request"]
    (request,) = spans["holdfast.request"]
    assert f"{request.context.trace_id:032x}" == CALLERS.split("-")[1]
    assert f"{request.parent.span_id:016x}" == CALLERS.split("-")[2]
    (submit,) = replica.submits
    assert submit.traceparent == f"00-{request.context.trace_id:032x}-{request.context.span_id:016x}-01"
    for name in ("queue", "prefill", "decode"):
        (span,) = spans[f"holdfast.{name}"]
        assert span.parent.span_id == request.context.span_id
        assert request.start_time <= span.end_time <= request.end_time + 2 * 10**6  # a loop's clock has milliseconds
    assert request.attributes["gen_ai.usage.output_tokens"] == 3
    assert request.attributes["holdfast.outcome"] == "length"
    places = [request.attributes[f"holdfast.tokens.{place}"] for place in ("memory", "disk", "computed")]
    assert (places, request.attributes["holdfast.attempts"]) == ([0, 0, 5], 1)


@on_a_loop
async def test_a_failover_is_a_span_between_two_decodes():
    traced, replicas = Traced(), [await FakeReplica.start("one"), await FakeReplica.start("two")]
    async with site(*replicas, tracer=traced.tracer) as place, AsyncClient(place.router.address) as client:
        with traced.tracer.start_as_current_span("the client's own") as own:
            stream = client.stream("hello", SamplingParams(max_tokens=60, seed=1))
            await anext(stream)
            busy = next(replica for replica in replicas if replica.submits)
            await busy.kill()
            place.replicas.remove(busy)
            assert [chunk async for chunk in stream]
    spans = traced.spans
    (failover,), decodes = spans["holdfast.failover"], spans["holdfast.decode"]
    assert [span.attributes["holdfast.replica"] for span in decodes] == [
        busy.replica_id,
        failover.attributes["holdfast.replica"],
    ]
    assert decodes[0].end_time == failover.start_time < failover.end_time == decodes[1].start_time
    (request,) = spans["holdfast.request"]
    assert request.parent.span_id == own.get_span_context().span_id
    assert request.attributes["holdfast.failovers"] == 1


@on_a_loop
async def test_what_is_not_sampled_is_not_traced_in_replicas_either():
    traced, replica = Traced(ParentBased(ALWAYS_OFF)), await FakeReplica.start("one")
    async with site(replica, http=True, tracer=traced.tracer) as place:
        await asked(place)
        await asked(place, UNSAMPLED)
        await asked(place, "no trace context at all")
        await asked(place, CALLERS)
    assert [bool(submit.traceparent) for submit in replica.submits] == [False, False, False, True]
    assert len(traced.spans["holdfast.request"]) == 1


@on_a_loop
async def test_without_a_tracer_nothing_is_sent_along():
    replica = await FakeReplica.start("one")
    async with site(replica, http=True) as place:
        await asked(place, CALLERS)
    assert replica.submits[0].traceparent == ""


def test_a_replica_makes_spans_of_queue_prefill_and_decode():
    traced, clock = Traced(), iter((100.0, 103.0, 110.0))
    traces = LinkTraces(traced.tracer, "r1", lambda: next(clock))
    params = SamplingParams(seed=1)
    request = EngineRequest(
        request_id="x", prompt_token_ids=(1, 2), output_token_ids=(7,), sampling_params=params, traceparent=CALLERS
    )
    load = EngineLoad(num_running=1, num_waiting=0, num_waiting_tokens=0, num_free_blocks=1, num_total_blocks=1)
    other = TokenDelta("of no trace", 0, (5,), FinishReason.STOP)
    traces.submitted("a", request)
    traces.note_sent(StepUpdate(load=load, deltas=[other, TokenDelta("a", 1, (5,), queued_s=1.0)]))
    traces.note_sent(StepUpdate(load=load, deltas=[TokenDelta("a", 2, (5,))]))
    traces.note_sent(StepUpdate(load=load, deltas=[TokenDelta("a", 3, (5, 6), FinishReason.LENGTH)]))
    traces.note_sent(StepUpdate(load=load, deltas=[TokenDelta("a", 3, (5, 6), FinishReason.LENGTH)]))
    times = {name: (one.start_time / 1e9, one.end_time / 1e9) for name, (one,) in traced.spans.items()}
    assert times == {
        "holdfast.replica.queue": (100.0, 101.0),
        "holdfast.replica.prefill": (101.0, 103.0),
        "holdfast.replica.decode": (103.0, 110.0),
    }
    (decode,) = traced.spans["holdfast.replica.decode"]
    assert f"{decode.parent.span_id:016x}" == CALLERS.split("-")[2]
    assert dict(decode.attributes) == {
        "holdfast.replica": "r1",
        "holdfast.prompt_tokens": 2,
        "holdfast.output_tokens": 5,
    }


def test_nothing_is_traced_unless_a_setting_says_where_to():
    assert tracer_provider(TelemetryConfig(), "router", "r1") is None


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigurationError, match=re.escape("pip install 'holdfast[otlp]'")):
        tracer_provider(TelemetryConfig(otlp_endpoint="http://127.0.0.1:4318"), "router", "r1")

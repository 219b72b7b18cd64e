"""Where a request's time went: its timeline by an injected clock, and the log of those that were slow."""

import logging

import pytest

from holdfast.router.dispatch.request_stream import OutputStream, WakingSink
from holdfast.router.dispatch.timeline import AttemptTimes, Cause, Phases, Timeline
from holdfast.router.events import ModelStatus
from holdfast.router.generation import OutputDelta
from holdfast.router.requests.request_stats import AdmittedRequest, EndedRequest, RequestStats, SlowRequests
from holdfast.worker.request import EngineRequest, FinishReason, SequenceKey
from holdfast.worker.sampling_params import SamplingParams
from tests.router.core import facts


def lost_once() -> Timeline:
    """Queued for 2 s, in the replica for 1 s more, prefilled in 3 s; decoded for 10 s, lost, and resumed after 4 s."""
    return Timeline(
        100.0,
        [
            AttemptTimes("a", 102.0, 0, first_output_s=106.0, queued_s=1.0, ended_s=116.0, cause=Cause.LOST),
            AttemptTimes("b", 117.0, 9, first_output_s=120.0, queued_s=0.5),
        ],
    )


def test_phases_of_a_request_that_went_on_elsewhere():
    phases = lost_once().phases(125.0)
    assert phases == Phases(queue_s=2.0, replica_queue_s=1.0, prefill_s=3.0, decode_s=15.0, failover_s=4.0)


@pytest.mark.parametrize(
    ("attempts", "phases"),
    [
        ([], Phases(queue_s=5.0)),
        ([AttemptTimes("a", 1.0, 0)], Phases(queue_s=1.0, prefill_s=4.0)),
        ([AttemptTimes("a", 1.0, 0, ended_s=2.0, cause=Cause.LOST)], Phases(queue_s=1.0, failover_s=4.0)),
        (
            [
                AttemptTimes("a", 1.0, 0, ended_s=2.0, cause=Cause.RETURNED),
                AttemptTimes("b", 2.0, 0, first_output_s=3.0, queued_s=0.5),
            ],
            Phases(queue_s=1.0, decode_s=2.0, failover_s=2.0),
        ),
    ],
    ids=["never sent", "ended before its first token", "lost before its first token", "returned, then run"],
)
def test_phases_of_requests_that_came_less_far(attempts, phases):
    assert Timeline(0.0, attempts).phases(5.0) == phases


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def a_request() -> EngineRequest:
    return EngineRequest(request_id="r1", prompt_token_ids=(1, 2, 3), sampling_params=SamplingParams(seed=1))


def output_delta(index: int, reason: FinishReason | None = None) -> OutputDelta:
    return OutputDelta("r1", index, (7,), "x", reason)


def watched(clock: Clock, stats: RequestStats) -> AdmittedRequest:
    now, clock.now = clock.now, 100.0
    admitted = AdmittedRequest(a_request(), ModelStatus(name="m", facts=facts(), num_replicas=1), stats, clock)
    clock.now = now
    return admitted


def ended_after(seconds: float, stats: RequestStats, *, reader_wait_s: float = 0.0) -> None:
    clock = Clock(106.0)
    watch = watched(clock, stats)
    watch.note(output_delta(0))
    clock.now = 100.0 + seconds
    watch.note(output_delta(1, FinishReason.LENGTH))
    watch.is_over = True
    watch.num_tokens, watch.timelines, watch.reader_wait_s = 2, [Timeline(100.0), lost_once()], reader_wait_s
    watch.end()


def test_a_slow_request_is_logged_with_where_its_time_went(caplog):
    stats = RequestStats()
    stats.on_end.append(SlowRequests(20.0, stats))
    with caplog.at_level(logging.WARNING):
        ended_after(19.9, stats)
        assert not caplog.records
        ended_after(25.0, stats, reader_wait_s=0.25)
    (record,) = caplog.records
    assert record.getMessage() == (
        "request r1 of model m was slow (length after 25.00 s): queue 2.00 s, replica queue 1.00 s, prefill 3.00 s, "
        "decode 15.00 s, failover 4.00 s, suspended 0.00 s, reader 0.25 s; 3 prompt and 2 output tokens, replicas a, b"
    )
    assert record.details["request_id"] == "r1"
    assert (record.details["num_failovers"], record.details["failover_s"]) == (1, 4.0)
    assert stats.models["m"].num_slow == 1


def test_a_request_that_failed_is_told_of_too():
    stats, heard = RequestStats(), list[EndedRequest]()
    stats.on_end.append(heard.append)
    watched(Clock(107.0), stats).end(RuntimeError("x"))
    assert (heard[0].outcome, heard[0].duration_s, heard[0].phases) == ("internal", 7.0, Phases(queue_s=7.0))


def test_output_waits_for_its_reader_from_the_second_piece_on_and_at_the_end():
    clock = Clock(0.0)
    stream = OutputStream(SequenceKey("", "r1"), WakingSink(lambda: None), clock)
    stream.push(output_delta(0))
    clock.now = 5.0  # a reader that comes for the first piece is not behind yet
    assert stream.poll()
    assert stream.behind_s == 0.0
    stream.push(output_delta(1))
    stream.push(output_delta(2))
    clock.now = 7.0
    assert len(stream.poll().token_ids) == 2
    assert stream.behind_s == 2.0
    stream.push(output_delta(3, FinishReason.LENGTH))
    clock.now = 8.0
    assert stream.poll()
    assert stream.behind_s == 3.0


def test_a_reader_that_waits_for_the_end_is_not_behind_before():
    clock = Clock(0.0)
    stream = OutputStream(SequenceKey("", "r1"), WakingSink(lambda: None), clock)
    stream.notifies_each_step = False
    for index in range(200):
        stream.push(output_delta(index))
    clock.now = 9.0
    stream.push(output_delta(200, FinishReason.LENGTH))
    assert stream.poll()
    assert stream.behind_s == 0.0

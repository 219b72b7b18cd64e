"""Tokens in the columns of a step: an attempt that has gone on for long takes a short way, with the same end."""

import pytest

from holdfast.router.events import Fail, SendAbort
from holdfast.worker.errors import InternalError
from holdfast.worker.request import NUM_STEPS_TO_CLEAR, FinishReason
from tests.router.core import Core, aborts, delivered, delta, failure, sent

LONG = NUM_STEPS_TO_CLEAR + 3


def gone_on(core: Core, request_id: str = "x", **settings: object) -> int:
    """An attempt that has had `LONG` tokens."""
    attempt = sent(core.submit(request_id, **settings)).attempt
    for index in range(LONG):
        core.step(delta(attempt, index, index % 25))
    return attempt


def test_tokens_text_and_positions_go_on(core):
    attempt = gone_on(core)
    deltas = [delivered(core.step(delta(attempt, LONG + step, step))) for step in range(3)]
    assert [one.first_token_index for one in deltas] == [LONG, LONG + 1, LONG + 2]
    assert [one.token_ids for one in deltas] == [(0,), (1,), (2,)]
    assert [one.text for one in deltas] == [chr(ord("a") + (LONG - 1) % 25), "a", "b"]
    last = delivered(core.step(delta(attempt, LONG + 3, 3, finish=FinishReason.LENGTH)))
    assert (last.text, last.usage.num_completion_tokens) == ("cd", LONG + 4)


def test_a_stop_ends_it_at_its_replica_too(core):
    attempt = gone_on(core, stop_at=25)
    actions = core.step(delta(attempt, LONG, 25))
    last, abort = actions
    assert (last.finish_reason, last.usage.num_completion_tokens) == (FinishReason.STOP, LONG + 1)
    assert aborts([abort]) == [("r", attempt)]
    assert core.dispatch.num_open == 0


def test_what_was_seen_is_dropped_and_a_gap_is_a_fault(core):
    attempt = gone_on(core)
    assert core.step(delta(attempt, LONG - 1, 5)) == []
    assert isinstance(failure(core.step(delta(attempt, LONG + 1, 5))).error, InternalError)


def test_a_fault_in_the_text_of_one_ends_that_one_alone(core):
    first, second = gone_on(core, "x"), gone_on(core, "y")
    broken = core.dispatch._requests[core.key("x")]
    broken.text = None
    actions = core.step(delta(first, LONG, 1), delta(second, LONG, 1))
    assert [type(action) for action in actions][:2] == [Fail, SendAbort]
    assert delivered(actions[2:]).request_id == "y"


def test_its_tenant_is_charged(core):
    attempt = gone_on(core)
    tenant = core.dispatch._requests[core.key("x")].tenant
    before = tenant.counter
    core.step(delta(attempt, LONG, 1))
    between = tenant.counter
    core.step(delta(attempt, LONG + 1, 1, 2))
    assert between > before
    assert tenant.counter - between == pytest.approx(2 * (between - before))

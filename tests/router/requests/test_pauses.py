"""Pauses of models: who waits, who is refused, and for how long."""

import asyncio

import pytest

from holdfast.router.operator_state import NO_OPERATOR_STATE, OperatorState, Pause
from holdfast.router.requests.request_admission import Pauses
from holdfast.worker.errors import DeadlineExceededError, InvalidRequestError, ModelPausedError, QueueFullError
from tests import loops


async def _waits_for_its_end() -> None:
    pauses = Pauses(max_waiting=2)
    await pauses.wait_over("m", 60.0)
    pauses.set([Pause(model="m"), Pause(model="other", refuses=True)])
    waiting = [asyncio.create_task(pauses.wait_over("m", 60.0)) for _ in range(2)]
    await asyncio.sleep(0)
    assert (pauses.num_waiting, [task.done() for task in waiting]) == (2, [False, False])
    with pytest.raises(QueueFullError):
        await pauses.wait_over("m", 60.0)
    with pytest.raises(ModelPausedError, match="'other' is paused"):
        await pauses.wait_over("other", 60.0)
    pauses.set([Pause(model="other")])
    await asyncio.gather(*waiting)
    assert pauses.num_waiting == 0
    with pytest.raises(DeadlineExceededError):
        await pauses.wait_over("other", 0.0)


def test_new_requests_of_a_paused_model_wait_for_its_end_or_are_refused():
    loops.run(_waits_for_its_end())


async def _is_refused_when_the_pause_changes() -> None:
    pauses = Pauses(max_waiting=2)
    pauses.set([Pause(model="m")])
    waiting = asyncio.create_task(pauses.wait_over("m", 60.0))
    await asyncio.sleep(0)
    pauses.set([Pause(model="m", refuses=True)])
    with pytest.raises(ModelPausedError):
        await waiting


def test_what_waits_is_refused_once_the_model_refuses():
    loops.run(_is_refused_when_the_pause_changes())


def test_orders_change_one_thing_and_say_so():
    operator_state = (
        NO_OPERATOR_STATE.with_drained("r", True).with_pause("m", Pause(model="m")).with_retired("m", "v", True)
    )
    assert (operator_state.drained, operator_state.pauses, operator_state.retired) == (
        {"r"},
        (Pause(model="m"),),
        {("m", "v")},
    )
    back = operator_state.with_drained("r", False).with_pause("m", None).with_retired("m", "v", False)
    assert (back.revision, back) == (6, OperatorState(revision=6))
    assert NO_OPERATOR_STATE.with_log_level("debug").log_level == "DEBUG"
    with pytest.raises(InvalidRequestError, match="must be one of DEBUG"):
        NO_OPERATOR_STATE.with_log_level("loud")

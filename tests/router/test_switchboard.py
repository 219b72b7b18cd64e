"""The shell around the core: streams by request, one timer, and nothing lost when something of ours breaks."""

import asyncio

import pytest

from router.config import LimitsConfig, RouterConfig
from router.dispatch import Dispatch
from router.events import SendAbort, SendSubmit, StepNews
from router.stream import OutputStream
from router.switchboard import Switchboard
from tests.router.core import NO_LOAD, LetterText, delta, facts
from tests.router.site import on_a_loop
from worker.errors import DeadlineExceededError, InternalError, RequestSupersededError
from worker.request import EngineRequest, FinishReason
from worker.sampling_params import SamplingParams


class Port:
    """A replica that only takes note."""

    def __init__(self) -> None:
        self.attempts: list[int] = []
        self.aborted: list[int] = []

    def submit(self, action: SendSubmit) -> None:
        self.attempts.append(action.attempt)

    def abort(self, action: SendAbort) -> None:
        self.aborted.append(action.attempt)


class Board:
    """A switchboard with one replica that is up."""

    def __init__(self) -> None:
        self.dispatch = Dispatch(RouterConfig(), LimitsConfig(), lambda n: 0)
        self.num_changes = 0
        self.switchboard = Switchboard(self.dispatch, self._note_change)
        self.port = Port()
        self.switchboard.replica_up(self.port, facts("r"), NO_LOAD)

    def open(self, request_id: str, timeout_s: float = 60) -> OutputStream:
        request = EngineRequest(request_id=request_id, prompt_token_ids=(1,), sampling_params=SamplingParams(seed=0))
        deadline = self.switchboard.now() + timeout_s
        return self.switchboard.open(request, model="m", text=LetterText(), deadline=deadline)

    def news(self, *deltas) -> None:
        self.switchboard.replica_news("r", StepNews(load=NO_LOAD, deltas=deltas))

    def _note_change(self) -> None:
        self.num_changes += 1


@on_a_loop
async def test_news_reach_the_stream_of_their_request():
    board = Board()
    x, y = board.open("x"), board.open("y")
    board.news(delta(board.port.attempts[1], 0, 3, finish=FinishReason.STOP))
    assert (await y.whole()).token_ids == (3,)
    board.switchboard.check_integrity()
    board.switchboard.close(x)
    assert board.port.aborted == [board.port.attempts[0]]
    board.switchboard.check_integrity()


@on_a_loop
async def test_closing_a_stream_that_is_over_leaves_a_newer_request_of_the_same_id_alone():
    board = Board()
    old = board.open("x")
    board.news(delta(board.port.attempts[0], 0, 3, finish=FinishReason.STOP))
    board.open("x")
    board.switchboard.close(old)
    assert board.switchboard.num_open == 1
    assert board.port.aborted == []


@on_a_loop
async def test_of_two_streams_with_one_id_the_newer_goes_on():
    board = Board()
    older, newer = board.open("x"), board.open("x")
    with pytest.raises(RequestSupersededError):
        await older.whole()
    board.switchboard.close(older)
    board.news(delta(board.port.attempts[1], 0, 3, finish=FinishReason.STOP))
    assert (await newer.whole()).token_ids == (3,)
    assert board.port.aborted == board.port.attempts[:1]


@on_a_loop
async def test_the_timer_goes_off_for_each_deadline_whatever_the_order():
    board = Board()
    streams = [board.open(f"within {timeout_s}", timeout_s) for timeout_s in (3600, 0.03, 0.01, 0.02)]
    for stream in streams[1:]:
        with pytest.raises(DeadlineExceededError):
            await stream.whole()
    assert sorted(board.port.aborted) == board.port.attempts[1:]


@on_a_loop
async def test_a_timer_that_breaks_ends_every_request(monkeypatch, caplog):
    board = Board()
    monkeypatch.setattr(board.dispatch, "tick", lambda now: 1 // 0)
    streams = board.open("x", timeout_s=0.01), board.open("y", timeout_s=60)
    for stream in streams:
        with pytest.raises(InternalError):
            await stream.whole()
    assert "the router's timer failed" in caplog.text


@on_a_loop
async def test_models_changes_are_announced():
    board = Board()
    assert board.num_changes == 1
    board.switchboard.replica_down("r", InternalError("x"))
    assert board.num_changes == 2
    board.switchboard.check_integrity()


@on_a_loop
async def test_idle_waits_for_the_last_request():
    board = Board()
    stream = board.open("x")
    waiting = asyncio.create_task(board.switchboard.idle())
    await asyncio.sleep(0)
    assert not waiting.done()
    board.switchboard.close(stream)
    await waiting

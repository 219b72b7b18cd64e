"""Dispatch host: streams by request, one timer, and nothing lost when something of Holdfast's breaks."""

import asyncio
from collections.abc import Callable

import pytest

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.dispatch import Dispatch
from holdfast.router.dispatch.dispatch_host import FINEST_S, DispatchHost
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_stream import OutputStream, WakingSink
from holdfast.router.events import SendAbort, SendSubmit
from holdfast.worker.errors import DeadlineExceededError, InternalError, ReplicaError, RequestSupersededError
from holdfast.worker.request import EngineRequest, FinishReason
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import StepUpdate
from tests.loops import on_each_loop
from tests.router.core import NO_LOAD, LetterText, delta, facts


class Port:
    """A replica that only takes note."""

    def __init__(self) -> None:
        self.attempts: list[int] = []
        self.aborted: list[int] = []

    def submit(self, action: SendSubmit) -> None:
        self.attempts.append(action.attempt)

    def abort(self, action: SendAbort) -> None:
        self.aborted.append(action.attempt)

    def take_pins(self, action) -> None: ...


class Alarm:
    """One that a test lets ring. Like uvloop's, it cannot be asked when."""

    def __init__(self, due: float, callback: Callable[[], object]) -> None:
        self.due = due
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.alarms: list[Alarm] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object], /) -> Alarm:
        self.alarms.append(Alarm(when, callback))
        return self.alarms[-1]

    def set(self, now: float) -> None:
        """Alarms that are due ring, in order of time."""
        self.now = now
        while due := [alarm for alarm in self.alarms if alarm.due <= now and not alarm.is_cancelled]:
            self.ring(min(due, key=lambda alarm: alarm.due))

    def ring(self, alarm: Alarm) -> None:
        self.alarms.remove(alarm)
        alarm.callback()


class Board:
    """A dispatch host with one replica that is up."""

    def __init__(self, config: RouterConfig | None = None, limits: LimitsConfig | None = None) -> None:
        self.clock = Clock()
        self.dispatch = Dispatch(config or RouterConfig(), limits or LimitsConfig(), lambda n: 0)
        self.num_changes = 0
        self.dispatch_host = DispatchHost(self.dispatch, self.clock, self._note_change)
        self.port = Port()
        self.dispatch_host.replica_up(self.port, facts("r"), NO_LOAD)

    def open(self, request_id: str, timeout_s: float = 60) -> OutputStream:
        request = EngineRequest(request_id=request_id, prompt_token_ids=(1,), sampling_params=SamplingParams(seed=0))
        deadline = self.dispatch_host.now() + timeout_s
        state = RequestState(request=request, model="m", text=LetterText(), deadline=deadline)
        self.dispatch_host.supersede(request.key)
        return self.dispatch_host.open(state, WakingSink(lambda: None))

    def news(self, *deltas) -> None:
        self.dispatch_host.replica_update("r", StepUpdate(load=NO_LOAD, deltas=deltas))

    def _note_change(self) -> None:
        self.num_changes += 1


def test_news_reach_the_stream_of_their_request():
    board = Board()
    x, y = board.open("x"), board.open("y")
    board.news(delta(board.port.attempts[1], 0, 3, finish=FinishReason.STOP))
    assert y.poll().token_ids == (3,)
    board.dispatch_host.check_integrity()
    board.dispatch_host.close(x)
    assert board.port.aborted == [board.port.attempts[0]]
    board.dispatch_host.check_integrity()


def test_closing_a_stream_that_is_over_leaves_a_newer_request_of_the_same_id_alone():
    board = Board()
    old = board.open("x")
    board.news(delta(board.port.attempts[0], 0, 3, finish=FinishReason.STOP))
    board.open("x")
    board.dispatch_host.close(old)
    assert board.dispatch_host.dispatch.num_open == 1
    assert board.port.aborted == []


def test_of_two_streams_with_one_id_the_newer_goes_on():
    board = Board()
    older, newer = board.open("x"), board.open("x")
    with pytest.raises(RequestSupersededError):
        older.poll()
    board.dispatch_host.close(older)
    board.news(delta(board.port.attempts[1], 0, 3, finish=FinishReason.STOP))
    assert newer.poll().token_ids == (3,)
    assert board.port.aborted == board.port.attempts[:1]


def test_the_timer_goes_off_for_each_deadline_whatever_the_order():
    board = Board()
    streams = {timeout_s: board.open(f"within {timeout_s}", timeout_s) for timeout_s in (3600, 30, 10, 20)}
    for timeout_s in (10, 20, 30):
        board.clock.set(100.0 + timeout_s)
        with pytest.raises(DeadlineExceededError):
            streams.pop(timeout_s).poll()
        assert all(stream.poll() is None for stream in streams.values())
    assert sorted(board.port.aborted) == board.port.attempts[1:]


def test_a_timer_that_rings_early_is_set_again():
    board = Board()
    stream = board.open("x", timeout_s=10)
    (alarm,) = board.clock.alarms
    board.clock.now = 110.0 - 1e-9
    board.clock.ring(alarm)
    assert stream.poll() is None
    (again,) = board.clock.alarms
    assert again.due >= board.clock.now + FINEST_S, "one that is set for now could ring on and on"
    board.clock.set(110.0 + FINEST_S)
    with pytest.raises(DeadlineExceededError):
        stream.poll()


def test_there_is_one_alarm_and_it_is_moved_only_to_an_earlier_time():
    board = Board()
    for timeout_s in (30, 60, 10, 10, 40):
        board.open(f"within {timeout_s} {len(board.port.attempts)}", timeout_s)
    assert [(alarm.due, alarm.is_cancelled) for alarm in board.clock.alarms] == [(130.0, True), (110.0, False)]


def test_a_timer_that_breaks_ends_every_request(monkeypatch, caplog):
    board = Board()
    monkeypatch.setattr(board.dispatch, "tick", lambda now: 1 // 0)
    streams = board.open("x", timeout_s=1), board.open("y", timeout_s=60)
    board.clock.set(101.0)
    for stream in streams:
        with pytest.raises(InternalError):
            stream.poll()
    assert "the router's timer failed" in caplog.text


def test_a_loss_that_cannot_be_dealt_with_ends_every_request_and_is_announced(monkeypatch, caplog):
    board = Board()
    lose = board.dispatch.replica_down
    monkeypatch.setattr(board.dispatch, "replica_down", lambda *args: (lose(*args), 1 // 0))
    stream, num_changes = board.open("x"), board.num_changes
    board.dispatch_host.replica_down("r", InternalError("x"))
    with pytest.raises(InternalError):
        stream.poll()
    assert board.num_changes == num_changes + 1
    assert "dealing with a lost replica failed" in caplog.text
    board.dispatch_host.check_integrity()


def test_a_request_that_cannot_be_sent_ends_and_the_others_do_not_notice(caplog):
    board = Board()
    good, submit = board.open("good"), board.port.submit

    def refuse_the_bad(action: SendSubmit) -> None:
        if action.request.request_id == "bad":
            raise ValueError("it cannot be told")
        submit(action)

    board.port.submit = refuse_the_bad
    bad, late = board.open("bad"), board.open("late")
    with pytest.raises(InternalError, match="request bad"):
        bad.poll()
    board.dispatch_host.close(bad)
    assert "it cannot be told" in caplog.text
    assert board.dispatch_host.dispatch.num_open == 2
    board.dispatch_host.check_integrity()
    board.news(*(delta(attempt, 0, 3, finish=FinishReason.STOP) for attempt in board.port.attempts))
    assert [stream.poll().token_ids for stream in (good, late)] == [(3,), (3,)]


def test_what_one_reader_breaks_is_not_lost_to_the_others():
    board = Board()
    first, second = board.open("first"), board.open("second")
    first.watch = lambda output_delta: 1 // 0
    board.news(*(delta(attempt, 0, 3, finish=FinishReason.STOP) for attempt in board.port.attempts))
    assert second.poll().token_ids == (3,)
    with pytest.raises(InternalError):
        first.poll()
    assert board.dispatch_host.dispatch.num_open == 0
    board.dispatch_host.check_integrity()


def test_models_changes_are_announced():
    board = Board()
    assert board.num_changes == 1
    board.dispatch_host.replica_down("r", InternalError("x"))
    assert board.num_changes == 2
    board.dispatch_host.check_integrity()


def test_who_waits_for_idle_hears_once_that_the_last_request_is_over():
    board, heard = Board(), []
    x, y = board.open("x"), board.open("y")
    board.dispatch_host.when_idle(lambda: heard.append("idle"))
    board.dispatch_host.close(x)
    assert heard == []
    board.dispatch_host.close(y)
    board.dispatch_host.close(board.open("z"))
    assert heard == ["idle"]
    board.dispatch_host.when_idle(lambda: heard.append("idle already"))
    assert heard == ["idle", "idle already"]


@on_each_loop
async def test_an_event_loop_is_a_clock():
    dispatch, news = Dispatch(RouterConfig(), LimitsConfig(), lambda n: 0), asyncio.Event()
    dispatch_host = DispatchHost(dispatch, asyncio.get_running_loop(), lambda: None)
    dispatch_host.replica_up(Port(), facts("r"), NO_LOAD)
    request = EngineRequest(request_id="x", prompt_token_ids=(1,), sampling_params=SamplingParams(seed=0))
    state = RequestState(request=request, model="m", text=LetterText(), deadline=dispatch_host.now() + 0.2)
    stream = dispatch_host.open(state, WakingSink(news.set))
    await news.wait()
    with pytest.raises(DeadlineExceededError):
        stream.poll()


def test_only_changes_of_replicas_are_news():
    """A link repeats at every view of the directory whether its replica stays."""
    board = Board()
    host = board.dispatch_host
    for is_retiring in (False, False, True, True, False, False):
        host.replica_retiring("r", is_retiring)
        host.replica_retiring("never-up", is_retiring)
    host.replica_down("never-up", ReplicaError("it has not come up"))
    host.replica_down("r", ReplicaError("it is gone"))
    host.replica_retiring("r", True)
    assert [(event.kind, event.replica_id) for event in host.news] == [
        ("up", "r"),
        ("leaving", "r"),
        ("back", "r"),
        ("lost", "r"),
    ]

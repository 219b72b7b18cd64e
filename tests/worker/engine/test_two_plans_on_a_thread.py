"""Two plans in flight on the engine's own thread: how it ends, fails, hangs and lets others in between."""

import threading

import pytest

from holdfast.worker.engine.engine import Engine
from holdfast.worker.errors import HoldfastError, ReplicaError
from holdfast.worker.replica.probe_loop import Watchdog
from holdfast.worker.request import FinishReason
from holdfast.worker.step_plan import StepResult
from holdfast.worker.step_update import StepUpdate
from tests.pseudo_model import PseudoRunner
from tests.worker.engine.two_plans import BLOCK_SIZE, VOCAB_SIZE, Listener, Turns, completion, make_request
from tests.worker.fake_device import FakeDevice, VirtualClock

TIMEOUT_S = 20


class Held(FakeDevice):
    """Holds each step until the test lets it go; fails in step `fails_in`."""

    def __init__(self, fails_in: int | None = None) -> None:
        super().__init__(PseudoRunner(64, BLOCK_SIZE, VOCAB_SIZE), BLOCK_SIZE, VirtualClock())
        self.waits, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.fails_in, self.num_collected, self.closed = fails_in, 0, False

    def collect(self) -> StepResult:
        self.waits.release()
        assert self.go_on.acquire(timeout=TIMEOUT_S)
        self.num_collected += 1
        if self.num_collected == self.fails_in:
            raise ReplicaError("the device is lost")
        return super().collect()


class Recorder(Listener):
    def __init__(self) -> None:
        super().__init__(VirtualClock())
        self._news = threading.Condition()

    def on_update(self, update: StepUpdate) -> None:
        with self._news:
            super().on_update(update)
            self._news.notify_all()

    def on_failure(self, error: HoldfastError) -> None:
        with self._news:
            super().on_failure(error)
            self._news.notify_all()

    def wait_for(self, condition) -> None:
        with self._news:
            assert self._news.wait_for(condition, TIMEOUT_S), "nothing came in time"


def threaded_engine(runner) -> tuple[Engine, Recorder]:
    turns, recorder = Turns(), Recorder()
    engine = Engine(turns.scheduler, runner, idle_s=0.05)
    engine.attach(recorder)
    engine.start()
    return engine, recorder


def with_two_in_flight(device: Held, **wishes) -> tuple[Engine, Recorder]:
    engine, recorder = threaded_engine(device)
    engine.submit(make_request("r", **{"max_tokens": 100, **wishes}), recorder)
    for _ in range(4):
        assert device.waits.acquire(timeout=TIMEOUT_S)
        device.go_on.release()
    assert device.waits.acquire(timeout=TIMEOUT_S)
    assert len(device._in_flight) == 2
    return engine, recorder


def test_stopping_with_two_plans_in_flight_answers_everyone_and_collects_both():
    device = Held()
    engine, recorder = with_two_in_flight(device)
    device.go_on.release(100)
    engine.stop()
    assert recorder.ended["r"] is FinishReason.ABORT
    assert recorder.failure is not None
    assert (device.num_collected, device.closed) == (device.num_launched, True)
    assert engine._core.scheduler.stats().num_used_blocks == 0


@pytest.mark.parametrize("fails_in", [5, 6], ids=["the older", "the younger"])
def test_a_failure_with_two_plans_in_flight_ends_the_engine_and_nothing_is_delivered_after_it(fails_in):
    device = Held(fails_in)
    engine, recorder = with_two_in_flight(device)
    device.go_on.release(100)
    recorder.wait_for(lambda: recorder.failure is not None)
    assert "the device is lost" in str(recorder.failure)
    assert recorder.tokens("r") == completion(fails_in - 1)
    engine.stop()
    assert device.closed


def test_what_is_done_between_steps_finds_no_step_in_flight():
    device = Held()
    engine, recorder = with_two_in_flight(device, max_tokens=8)
    future = engine.between_steps(lambda: len(device._in_flight))
    device.go_on.release(100)
    assert future.result(TIMEOUT_S) == 0
    recorder.wait_for(lambda: "r" in recorder.ended)
    assert recorder.tokens("r") == completion(8)
    engine.stop()


def test_a_failure_before_an_action_between_steps_is_the_actions_too():
    device = Held(fails_in=6)
    engine, recorder = with_two_in_flight(device)
    future = engine.between_steps(lambda: None)
    device.go_on.release(100)
    with pytest.raises(ReplicaError, match="the device is lost"):
        future.result(TIMEOUT_S)
    recorder.wait_for(lambda: recorder.failure is not None)
    engine.stop()


def test_a_device_that_is_stuck_with_two_plans_in_flight_is_found_and_so_is_one_with_nobody_left():
    device, now = Held(), VirtualClock()
    engine, recorder = with_two_in_flight(device)
    watchdog = Watchdog(engine.progress, lambda: engine.has_work, lambda still_s: None, frozen_after_s=1.0, clock=now)

    def is_frozen_after(seconds: float) -> bool:
        looks = []
        for _ in range(round(seconds / 0.1)):
            now.now += 0.1
            looks.append(watchdog.look())
        return any(looks)

    assert not is_frozen_after(0.9)
    device.go_on.release()
    assert device.waits.acquire(timeout=TIMEOUT_S)
    assert not is_frozen_after(0.9), "one of the two has come"
    engine.abort("r")
    device.go_on.release()
    assert device.waits.acquire(timeout=TIMEOUT_S)
    assert engine.load.num_running == 1
    assert engine.has_work, "a step for nobody is collected too"
    assert is_frozen_after(1.2)
    device.go_on.release(100)
    recorder.wait_for(lambda: "r" in recorder.ended)
    engine.stop()


def test_who_leaves_with_two_plans_in_flight_takes_nothing_of_others_along():
    device = Held()
    engine, recorder = with_two_in_flight(device, max_tokens=12)
    other = Recorder()
    engine.attach(other)
    engine.submit(make_request("theirs", max_tokens=50), other)
    for _ in range(3):
        device.go_on.release()
        assert device.waits.acquire(timeout=TIMEOUT_S)
    engine.detach(other)
    device.go_on.release(100)
    recorder.wait_for(lambda: "r" in recorder.ended)
    assert recorder.tokens("r") == completion(12)
    assert engine.between_steps(lambda: engine._core.scheduler.stats().num_used_blocks).result(TIMEOUT_S) == 0
    engine.stop()

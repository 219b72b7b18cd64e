"""A frozen engine is called out, from a thread that it cannot hold up, and everyone hears of its end."""

import threading

from holdfast.worker.engine.engine import Engine
from holdfast.worker.errors import HoldfastError, ReplicaError
from holdfast.worker.progress import ProgressCounter
from holdfast.worker.replica.probe_loop import Watchdog
from holdfast.worker.step_plan import StepPlan, StepResult
from holdfast.worker.step_update import StepUpdate
from tests.pseudo_model import PseudoRunner
from tests.worker.schedulers import BLOCK_SIZE, make_request, make_scheduler

TIMEOUT_S = 30


class StuckRunner(PseudoRunner):
    """Gets stuck in its third step, until it is let go."""

    def __init__(self) -> None:
        super().__init__(64, BLOCK_SIZE)
        self.released = threading.Event()

    def run(self, plan: StepPlan) -> StepResult:
        if plan.step_id == 3:
            assert self.released.wait(TIMEOUT_S)
        return super().run(plan)


class Recorder:
    def __init__(self) -> None:
        self.num_tokens = 0
        self.errors: list[HoldfastError] = []
        self.ended = threading.Event()

    def on_update(self, update: StepUpdate) -> None:
        self.num_tokens += sum(len(delta.token_ids) for delta in update.deltas)

    def on_failure(self, error: HoldfastError) -> None:
        self.errors.append(error)
        self.ended.set()


def test_a_stuck_engine_is_given_up_and_its_callers_are_told_once():
    runner, recorder = StuckRunner(), Recorder()
    engine = Engine(make_scheduler(), runner, idle_s=0.05)
    watchdog = Watchdog(
        engine.progress,
        lambda: engine.has_work,
        lambda still_s: engine.give_up(ReplicaError(f"frozen for {still_s:.1f} s")),
        frozen_after_s=0.3,
    )
    engine.start()
    watchdog.start()
    engine.attach(recorder)
    engine.submit(make_request("a", max_tokens=30), recorder)
    assert recorder.ended.wait(TIMEOUT_S)
    assert "frozen" in str(engine.failure)
    runner.released.set()
    engine.stop()
    assert [str(error) for error in recorder.errors] == [str(engine.failure)]
    assert recorder.num_tokens == 2, "what comes after the end is not delivered"
    assert runner.closed


def test_an_engine_learns_by_its_clock_how_far_apart_counts_are():
    now, over = 0.0, threading.Event()

    class SlowRunner(PseudoRunner):
        def run(self, plan: StepPlan) -> StepResult:
            nonlocal now
            now += 0.25
            return super().run(plan)

    class UntilTheEnd(Recorder):
        def on_update(self, update: StepUpdate) -> None:
            if any(delta.finish_reason is not None for delta in update.deltas):
                over.set()

    listener = UntilTheEnd()
    engine = Engine(make_scheduler(), SlowRunner(64, BLOCK_SIZE), clock=lambda: now, idle_s=0.05)
    engine.start()
    engine.attach(listener)
    engine.submit(make_request("a", max_tokens=5), listener)
    assert over.wait(TIMEOUT_S)
    engine.stop()
    assert engine.progress.expected_gap_s == 0.25


def test_a_watchdog_looks_through_its_clock():
    times = iter(range(100))
    progress = ProgressCounter()
    watchdog = Watchdog(progress, lambda: True, lambda _: None, frozen_after_s=1.0, clock=lambda: next(times))
    assert [watchdog.look() for _ in range(6)] == [False] * 4 + [True] * 2
    progress.tick()
    assert not watchdog.look()


class Starved:
    """A core wait that knows what share of the time other programs had the cores."""

    def __init__(self, share: float) -> None:
        self._share = share
        self.num_forgotten = 0

    def since_last(self, passed_s: float) -> float:
        return self._share * passed_s

    def forget(self) -> None:
        self.num_forgotten += 1


def looks_until_frozen(share: float) -> int | None:
    times = iter(number / 10 for number in range(1000))
    progress, starved = ProgressCounter(), Starved(share)
    watchdog = Watchdog(
        progress, lambda: True, lambda _: None, frozen_after_s=1.0, core_wait=starved, clock=lambda: next(times)
    )
    return next((number for number in range(500) if watchdog.look()), None)


def test_an_engine_without_a_core_is_not_frozen():
    assert looks_until_frozen(0.0) in (10, 11)
    assert looks_until_frozen(0.5) in (20, 21), "a stuck one is found later on a busy machine, and is found"
    assert looks_until_frozen(1.0) is None


def test_times_of_threads_are_read_only_while_nothing_moves():
    times = iter(number / 10 for number in range(1000))
    progress, starved = ProgressCounter(), Starved(1.0)
    watchdog = Watchdog(
        progress, lambda: True, lambda _: None, frozen_after_s=1.0, core_wait=starved, clock=lambda: next(times)
    )
    for _ in range(5):
        progress.tick()
        watchdog.look()
    assert (starved.num_forgotten, progress.starved_s) == (5, 0.0)

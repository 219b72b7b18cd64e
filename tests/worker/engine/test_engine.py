"""The engine's promises: every request is answered, whichever way the loop ends."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.worker.engine.block_tier import BlockTier
from holdfast.worker.engine.tier_mover import TierShape
from holdfast.worker.errors import DeadlineExceededError, InvalidRequestError, ReplicaError
from holdfast.worker.request import NUM_STEPS_TO_CLEAR, Adapter, BlockSource, FinishReason, PoisonRisk
from holdfast.worker.step_plan import StepPlan, StepResult
from holdfast.worker.step_update import StepUpdate
from tests.pseudo_model import PseudoRunner, pseudo_completion
from tests.worker.engine.engines import BLOCK_SIZE, NUM_BLOCKS, TIMEOUT_S, Gate, Recorder, make_engine, make_request
from tests.worker.engine.played_tier import PlayedMover


class Broken(PseudoRunner):
    """A runner that fails at its third step."""

    def run(self, plan: StepPlan) -> StepResult:
        if self.num_steps == 2:
            raise RuntimeError("connection closed by peer")
        return super().run(plan)


def test_requests_get_the_models_tokens(engine_and_friends):
    engine, runner, recorder = engine_and_friends
    prompts = {f"r{i}": list(range(1, i + 2)) for i in range(20)}
    for request_id, prompt in prompts.items():
        engine.submit(make_request(request_id, prompt, seed=len(prompt)), recorder)
    recorder.wait_for(lambda: len(recorder.finished) == len(prompts))
    for request_id, prompt in prompts.items():
        assert recorder.tokens[request_id] == pseudo_completion(prompt, len(prompt), 8, runner.vocab_size)
    assert set(recorder.finished.values()) == {FinishReason.LENGTH}
    assert engine.stats().num_free_blocks == NUM_BLOCKS


def test_a_continued_request_reports_only_what_is_new():
    engine, runner, recorder = make_engine()
    whole = pseudo_completion((1, 2, 3), 7, 8, runner.vocab_size)
    recorder.tokens["r"] = whole[:5]
    engine.submit(make_request("r", output=whole[:5]), recorder)
    recorder.wait_for(lambda: "r" in recorder.finished)
    assert recorder.tokens["r"] == whole
    engine.stop()


def test_an_abort_during_a_step_is_the_requests_last_word():
    engine, gate, recorder = make_engine(Gate())
    engine.submit(make_request("r", max_tokens=100), recorder)
    assert gate.entered.acquire(timeout=TIMEOUT_S)
    engine.abort("r")
    gate.go_on.release()
    recorder.wait_for(lambda: recorder.finished.get("r") is FinishReason.ABORT)
    assert engine.stats().num_free_blocks == NUM_BLOCKS
    assert gate.num_steps == 1
    engine.stop()


def test_others_hear_of_a_suspect_before_its_first_step_and_until_it_is_cleared():
    engine, gate, recorder = make_engine(Gate())
    other = Recorder()
    engine.attach(other)
    engine.submit(make_request("r", max_tokens=100, poison_risk=PoisonRisk.SUSPECT), recorder)
    assert gate.entered.acquire(timeout=TIMEOUT_S)
    assert engine.load.num_foreign_suspects == other.load.num_foreign_suspects == 1
    assert recorder.load.num_foreign_suspects == 0
    gate.go_on.release(NUM_STEPS_TO_CLEAR)
    other.wait_for(lambda: other.load.num_foreign_suspects == 0)
    assert len(recorder.tokens["r"]) == NUM_STEPS_TO_CLEAR
    gate.go_on.release(100)
    engine.stop()


def test_a_request_on_trial_does_not_run_beside_a_suspect_of_another_router():
    engine, gate, recorder = make_engine(Gate())
    other = Recorder()
    engine.attach(other)
    engine.submit(make_request("r", max_tokens=4, poison_risk=PoisonRisk.SUSPECT), recorder)
    engine.submit(make_request("tried", max_tokens=2, poison_risk=PoisonRisk.ON_TRIAL), other)
    gate.go_on.release(100)
    other.wait_for(lambda: "tried" in other.rejected)
    recorder.wait_for(lambda: "r" in recorder.finished)
    engine.submit(make_request("tried again", max_tokens=2, poison_risk=PoisonRisk.ON_TRIAL), other)
    other.wait_for(lambda: "tried again" in other.finished)
    engine.stop()


def test_a_request_whose_time_is_up_while_it_runs_is_rejected_after_its_tokens():
    times = [0.0]
    engine, gate, recorder = make_engine(Gate(), clock=lambda: times[0])
    engine.submit(make_request("late", max_tokens=100, time_left_s=5), recorder)
    assert gate.entered.acquire(timeout=TIMEOUT_S)
    times[0] = 5.0
    engine.submit(make_request("patient", max_tokens=2), recorder)
    gate.go_on.release(100)
    recorder.wait_for(lambda: "late" in recorder.rejected and "patient" in recorder.finished)
    assert isinstance(recorder.rejected["late"], DeadlineExceededError)
    assert len(recorder.tokens["late"]) == 1
    stats = engine.stats()
    assert (stats.num_expired, stats.num_free_blocks) == (1, NUM_BLOCKS)
    engine.stop()


def test_the_id_of_an_expired_request_is_free_again(engine_and_friends):
    engine, _, recorder = engine_and_friends
    engine.submit(make_request("r", time_left_s=0), recorder)
    recorder.wait_for(lambda: "r" in recorder.rejected)
    engine.submit(make_request("r"), recorder)
    recorder.wait_for(lambda: "r" in recorder.finished)


def test_what_the_scheduler_refuses_is_answered_with_its_reason(engine_and_friends):
    engine, _, recorder = engine_and_friends
    engine.submit(make_request("long", prompt=range(500)), recorder)
    recorder.wait_for(lambda: "long" in recorder.rejected)
    assert isinstance(recorder.rejected["long"], InvalidRequestError)


def test_a_request_id_in_use_is_refused_and_the_first_goes_on():
    engine, gate, recorder = make_engine(Gate())
    engine.submit(make_request("r"), recorder)
    assert gate.entered.acquire(timeout=TIMEOUT_S)
    engine.submit(make_request("r"), recorder)
    gate.go_on.release(100)
    recorder.wait_for(lambda: "r" in recorder.rejected and "r" in recorder.finished)
    assert recorder.finished["r"] is FinishReason.LENGTH
    engine.stop()


def test_stop_answers_every_request():
    engine, gate, recorder = make_engine(Gate())
    for i in range(10):
        engine.submit(make_request(f"r{i}"), recorder)
    assert gate.entered.acquire(timeout=TIMEOUT_S)
    gate.go_on.release(100)
    engine.stop()
    assert len(recorder.finished) == 10
    assert recorder.failure is not None
    with pytest.raises(ReplicaError):
        engine.submit(make_request("late"), recorder)


def test_a_failing_runner_is_told_to_every_listener_and_to_later_callers():
    engine, runner, recorder = make_engine(Broken(NUM_BLOCKS, BLOCK_SIZE))
    engine.submit(make_request("r"), recorder)
    recorder.wait_for(lambda: recorder.failure is not None)
    assert "connection closed by peer" in str(recorder.failure)
    with pytest.raises(ReplicaError):
        engine.stats()
    engine.stop()
    assert runner.closed


def test_detaching_aborts_what_came_through_the_listener_and_nothing_else():
    engine, gate, recorder = make_engine(Gate())
    other = Recorder()
    engine.attach(other)
    engine.submit(make_request("mine", max_tokens=5), recorder)
    engine.submit(make_request("theirs", max_tokens=5), other)
    assert gate.entered.acquire(timeout=TIMEOUT_S)
    engine.detach(other)
    gate.go_on.release(100)
    recorder.wait_for(lambda: "mine" in recorder.finished)
    assert "theirs" not in other.finished
    assert engine.stats().num_free_blocks == NUM_BLOCKS
    engine.stop()


def test_a_listener_that_breaks_loses_only_its_own_requests(engine_and_friends):
    engine, _, recorder = engine_and_friends

    class Breaking(Recorder):
        def on_update(self, update: StepUpdate) -> None:
            raise RuntimeError("event loop is closed")

    breaking = Breaking()
    engine.attach(breaking)
    engine.submit(make_request("theirs"), breaking)
    engine.submit(make_request("mine"), recorder)
    recorder.wait_for(lambda: "mine" in recorder.finished)
    assert engine.stats().num_running == 0


def test_every_listener_hears_of_every_step(engine_and_friends):
    engine, runner, recorder = engine_and_friends
    other = Recorder()
    engine.attach(other)
    engine.submit(make_request("r"), recorder)
    recorder.wait_for(lambda: "r" in recorder.finished)
    engine.stats()
    assert other.num_updates >= runner.num_steps


def test_every_listener_hears_that_the_load_has_changed_without_a_step(engine_and_friends):
    engine, _, recorder = engine_and_friends
    other = Recorder()
    engine.attach(other)
    engine.submit(make_request("theirs", prompt=range(1, 60), max_tokens=140), other)
    other.wait_for(lambda: other.tokens["theirs"])
    engine.detach(other)
    recorder.wait_for(lambda: recorder.load is not None and recorder.load.num_running == 0)


def test_stop_does_not_wait_for_a_step_that_never_ends():
    """As one does that waits for a device whose peer has died. Everyone is answered all the same."""
    entered, released = threading.Event(), threading.Event()

    class Stuck(PseudoRunner):
        def run(self, plan):
            entered.set()
            released.wait(TIMEOUT_S)
            return super().run(plan)

    engine, _, recorder = make_engine(Stuck(NUM_BLOCKS, BLOCK_SIZE))
    engine.submit(make_request("r"), recorder)
    assert entered.wait(TIMEOUT_S)
    engine.stop(timeout_s=0.01)
    assert isinstance(recorder.failure, ReplicaError)
    assert not engine.wait(0), "the step is still running"
    released.set()


@pytest.mark.parametrize("end", ["stop", "give up", "fail"])
def test_an_engine_that_ends_before_its_start_answers_everyone_and_does_not_start(end):
    engine, runner, recorder = make_engine(is_started=False)
    closed = threading.Event()
    runner.close = closed.set
    engine.submit(make_request("r"), recorder)
    action = engine.between_steps(lambda: None)
    assert not engine.wait(0.0)
    error = ReplicaError("a rank died")
    {"stop": engine.stop, "give up": lambda: engine.give_up(error), "fail": lambda: engine.fail(error)}[end]()
    assert closed.is_set()
    assert isinstance(recorder.failure, ReplicaError)
    assert isinstance(action.exception(0), ReplicaError)
    assert engine.wait(0.0)
    assert not engine.has_work
    for late in (lambda: engine.submit(make_request("s"), recorder), engine.stats, engine.start):
        with pytest.raises(ReplicaError):
            late()
    engine.stop()


def test_an_action_whose_caller_gives_up_is_not_done_and_the_engine_goes_on():
    """So a replica outlives another one that stops waiting for its answer."""
    engine, gate, recorder = make_engine(Gate())
    engine.submit(make_request("r"), recorder)
    assert gate.entered.acquire(timeout=TIMEOUT_S)
    done: list[str] = []
    given_up = engine.between_steps(lambda: done.append("given up"))
    following = engine.between_steps(lambda: done.append("following"))
    assert given_up.cancel()
    gate.go_on.release(100)
    following.result(TIMEOUT_S)
    assert done == ["following"]
    assert engine.failure is None
    engine.stop()


def test_a_request_that_waits_for_blocks_is_work_and_the_engine_shows_that_it_lives():
    """Else its router takes the replica for frozen."""
    engine, _, recorder = make_engine(is_started=False)
    mover, scheduler = PlayedMover(), engine._core.scheduler
    shape = TierShape(block_bytes=1)
    of_scheduler = lambda *_: 1e9, scheduler.num_awaited_blocks, scheduler.can_preempt, scheduler.pinning
    engine.tier.put_below(BlockTier(*scheduler.caches, mover, shape, *of_scheduler, has_store=False))
    engine.start()
    try:
        held = replace(make_request("held", range(20)), block_source=BlockSource("there:1", 100))
        engine.submit(held, recorder)
        wait_until(lambda: mover.asked)
        assert engine.has_work
        before = engine.progress.count
        wait_until(lambda: engine.progress.count > before + 2)
        engine.abort("held")
        recorder.wait_for(lambda: recorder.finished)
        wait_until(lambda: not engine.has_work)
    finally:
        engine.stop()


class NeverLoaded:
    """Orders for adapters whose loads do not end."""

    def __init__(self) -> None:
        self.asked: list[Adapter] = []

    def fetch(self, ticket: int, adapter: Adapter, then: Callable[[], None]) -> None:
        self.asked.append(adapter)

    def take(self, ticket: int, slot: int) -> Exception | None: ...


def test_so_is_a_request_that_waits_for_its_adapter():
    engine, _, recorder = make_engine(is_started=False)
    orders = NeverLoaded()
    engine.adapters.serve(2, orders)
    engine.start()
    try:
        engine.submit(replace(make_request("held"), adapter=Adapter("a", "12", "/nowhere")), recorder)
        wait_until(lambda: orders.asked)
        assert engine.has_work
        before = engine.progress.count
        wait_until(lambda: engine.progress.count > before + 2)
        engine.abort("held")
        recorder.wait_for(lambda: recorder.finished)
        wait_until(lambda: not engine.has_work)
    finally:
        engine.stop()


def wait_until(condition: Callable[[], object]) -> None:
    ends_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.001)

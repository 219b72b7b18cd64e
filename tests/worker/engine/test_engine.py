"""The engine's promises: every request is answered, whichever way the loop ends."""

import threading
from collections import defaultdict
from dataclasses import replace

import pytest

from holdfast.worker.block_hash import HashChain, short_hash
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine_core.engine_core import STATS_EVERY_STEPS
from holdfast.worker.errors import DeadlineExceededError, HoldfastError, InvalidRequestError, ReplicaError
from holdfast.worker.plan.step_plan import StepPlan, StepResult
from holdfast.worker.request import EngineLoad, EngineRequest, FinishReason
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduling.scheduler import Scheduler
from holdfast.worker.scheduling.step_limits import StepLimits
from holdfast.worker.stats import EngineStats
from holdfast.worker.step_update import StepUpdate
from holdfast.worker.suspicion import NUM_STEPS_TO_CLEAR, Suspicion
from holdfast.worker.tuning.step_time import StepCosts, shape_of
from holdfast.worker.tuning.step_tuner import StepTuner
from tests.pseudo_model import PseudoRunner, pseudo_completion

BLOCK_SIZE, NUM_BLOCKS, TIMEOUT_S = 4, 64, 20


class Recorder:
    """A listener that remembers, and lets tests wait for a last word."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, FinishReason] = {}
        self.rejected: dict[str, HoldfastError] = {}
        self.failure: HoldfastError | None = None
        self.num_updates = 0
        self.load: EngineLoad | None = None
        self._news = threading.Condition()

    def on_update(self, update: StepUpdate) -> None:
        with self._news:
            self.num_updates += 1
            self.load = update.load
            for delta in update.deltas:
                assert delta.first_token_index == len(self.tokens[delta.attempt])
                assert delta.attempt not in self.finished
                self.tokens[delta.attempt].extend(delta.token_ids)
                if delta.finish_reason:
                    self.finished[delta.attempt] = delta.finish_reason
            self.rejected.update({rejection.attempt: rejection.error for rejection in update.rejections})
            self._news.notify_all()

    def on_failure(self, error: HoldfastError) -> None:
        with self._news:
            self.failure = error
            self._news.notify_all()

    def wait_for(self, condition) -> None:
        with self._news:
            assert self._news.wait_for(condition, TIMEOUT_S), "nothing came in time"


class Gate(PseudoRunner):
    """A runner that holds each step until the test lets it go."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE)
        self.entered, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    def run(self, plan: StepPlan) -> StepResult:
        self.entered.release()
        assert self.go_on.acquire(timeout=TIMEOUT_S)
        return super().run(plan)


class Broken(PseudoRunner):
    """A runner that fails at its third step."""

    def run(self, plan: StepPlan) -> StepResult:
        if self.num_steps == 2:
            raise RuntimeError("connection closed by peer")
        return super().run(plan)


def make_engine(runner: PseudoRunner | None = None, **options) -> tuple[Engine, PseudoRunner, Recorder]:
    runner = runner or PseudoRunner(NUM_BLOCKS, BLOCK_SIZE)
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=200,
        eos_token_ids=frozenset(),
    )
    engine, recorder = Engine(scheduler, runner, idle_s=0.05, **options), Recorder()
    engine.attach(recorder)
    engine.start()
    return engine, runner, recorder


def make_request(
    request_id: str, prompt=(1, 2, 3), max_tokens=8, seed=7, output=(), time_left_s=None, suspicion=Suspicion.NONE
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, seed=seed),
        output_token_ids=tuple(output),
        time_left_s=time_left_s,
        suspicion=suspicion,
    )


@pytest.fixture
def engine_and_friends():
    engine, runner, recorder = make_engine()
    yield engine, runner, recorder
    engine.stop()
    assert runner.closed


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
    engine.submit(make_request("r", max_tokens=100, suspicion=Suspicion.SUSPECT), recorder)
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
    engine.submit(make_request("r", max_tokens=4, suspicion=Suspicion.SUSPECT), recorder)
    engine.submit(make_request("tried", max_tokens=2, suspicion=Suspicion.ON_TRIAL), other)
    gate.go_on.release(100)
    other.wait_for(lambda: "tried" in other.rejected)
    recorder.wait_for(lambda: "r" in recorder.finished)
    engine.submit(make_request("tried again", max_tokens=2, suspicion=Suspicion.ON_TRIAL), other)
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


class Timed(PseudoRunner):
    """A runner whose steps take no time but on its own clock."""

    def __init__(self) -> None:
        super().__init__(8 * NUM_BLOCKS, BLOCK_SIZE)
        self.now = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        costs = StepCosts(base_s=0.01, decode_s=0.01, token_s=0.001, context_token_s=0.0)
        self.now += costs.predict(shape_of(plan))
        return super().run(plan)


def run_tuned(**config) -> tuple[Engine, Scheduler]:
    """30 requests of 100 tokens, all through: 8 at a time, whose steps take 10 + 8 * (10 + 1) = 98 ms."""
    runner, recorder = Timed(), Recorder()
    settings = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=8, **config)
    scheduler = Scheduler(
        settings, num_blocks=8 * NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=200, eos_token_ids=frozenset()
    )
    tuner = StepTuner(settings, block_size=BLOCK_SIZE)
    engine = Engine(scheduler, runner, tuner=tuner, clock=lambda: runner.now, idle_s=0.05)
    engine.attach(recorder)
    for i in range(30):
        engine.submit(make_request(f"r{i}", max_tokens=100), recorder)
    engine.start()
    recorder.wait_for(lambda: len(recorder.finished) == 30)
    return engine, scheduler


def test_the_engine_says_what_its_steps_ask_for_and_changes_nothing_unasked():
    engine, scheduler = run_tuned()
    recommendations = engine.recommendations()
    engine.stop()
    assert [(found.setting, found.current) for found in recommendations] == [("max_num_seqs", 8)]
    assert recommendations[0].recommended < 8
    assert "98 ms from token to token" in recommendations[0].reason
    assert scheduler.limits == StepLimits(max_num_batched_tokens=16, max_num_seqs=8)


def test_with_auto_tune_the_engine_does_what_it_says(caplog):
    with caplog.at_level("INFO", logger="holdfast.worker.engine.engine"):
        engine, scheduler = run_tuned(auto_tune=True)
    recommendations = engine.recommendations()
    engine.stop()
    assert scheduler.limits.max_num_seqs == recommendations[0].recommended < 8
    assert "max_num_seqs: 8 -> " in caplog.text


# --- the prefix cache, and statistics ---


class Follower(Recorder):
    """A listener that keeps the cached blocks as it is told of them."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: set[int] = set()
        self.num_told = 0
        self.stats: list[EngineStats] = []

    def on_update(self, update: StepUpdate) -> None:
        assert not set(update.cache.stored) & set(update.cache.evicted)
        self.num_told += len(update.cache.stored)
        self.cached = (self.cached | set(update.cache.stored)) - set(update.cache.evicted)
        if update.stats is not None:
            self.stats.append(update.stats)
        super().on_update(update)


def block_hashes(*token_ids: int) -> set[int]:
    chain = HashChain("")
    return {short_hash(chain.hash_of(i, token_ids, BLOCK_SIZE)) for i in range(len(token_ids) // BLOCK_SIZE)}


def test_each_follower_of_the_cache_hears_all_of_it_from_its_own_beginning(engine_and_friends):
    engine, _, deaf = engine_and_friends
    early, late = Follower(), Follower()
    engine.submit(make_request("before anyone", prompt=range(8), max_tokens=1), deaf)
    deaf.wait_for(lambda: "before anyone" in deaf.finished)
    engine.attach(early)
    engine.follow_cache(early)
    engine.submit(make_request("before the second", prompt=range(100, 108), max_tokens=1), early)
    early.wait_for(lambda: len(early.cached) == 4)
    engine.attach(late)
    engine.follow_cache(late)
    engine.submit(make_request("for both", prompt=range(200, 212), max_tokens=1), late)
    expected = block_hashes(*range(8)) | block_hashes(*range(100, 108)) | block_hashes(*range(200, 212))
    for follower in (early, late):
        follower.wait_for(lambda follower=follower: follower.cached == expected)
        assert follower.num_told == len(expected), "nothing is told twice"


def test_followers_hear_of_evictions(engine_and_friends):
    engine, *_ = engine_and_friends
    follower = Follower()
    engine.attach(follower)
    engine.follow_cache(follower)
    for first in range(0, 900, 100):  # 9 x 10 blocks pass through a cache of 64
        engine.submit(make_request(f"{first}", prompt=range(first, first + 40), max_tokens=1), follower)
    follower.wait_for(lambda: len(follower.finished) == 9)
    stats = engine.stats()
    assert stats.num_evictions > 0
    assert len(follower.cached) == stats.num_cached_blocks
    assert block_hashes(*range(800, 840)) <= follower.cached
    assert not block_hashes(*range(40)) & follower.cached


def test_statistics_come_first_now_and_then_and_when_the_engine_is_idle(engine_and_friends):
    engine, runner, _ = engine_and_friends
    follower = Follower()
    engine.attach(follower)
    engine.submit(make_request("a", prompt=range(8), max_tokens=100), follower)
    follower.wait_for(lambda: follower.stats and follower.stats[-1].num_finished == 1)
    assert len(follower.stats) <= 3 + runner.num_steps // STATS_EVERY_STEPS
    last = follower.stats[-1]
    assert (last.num_running, last.num_requests, last.num_tokens_generated) == (0, 1, 100)
    assert last.num_steps == runner.num_steps
    exact = engine.stats()  # what listeners were told in the last step could not have that step's own end
    assert sum(exact.step_counts) == exact.num_steps == sum(last.step_counts) + 1
    assert exact.plan_time_s >= last.plan_time_s
    assert exact.commit_time_s > last.commit_time_s > 0
    times = {name: getattr(last, name) for name in ("plan_time_s", "commit_time_s", "step_counts")}
    assert last == replace(exact, **times)


def test_rates_are_zero_before_anything_has_run(engine_and_friends):
    engine, *_ = engine_and_friends
    stats = engine.stats()
    assert (stats.prefix_hit_rate, stats.tokens_per_s) == (0, 0)


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
    released.set()

"""What an engine tells of itself: its prefix cache, statistics, and what its tuner recommends."""

from dataclasses import replace

from holdfast.worker.block_hash import HashChain, short_hash
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.engine_core import STATS_EVERY_STEPS
from holdfast.worker.scheduler.batching import StepLimits
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.step_time import StepCosts, shape_of
from holdfast.worker.scheduler.step_tuner import StepTuner
from holdfast.worker.step_plan import StepPlan, StepResult
from holdfast.worker.step_update import EngineStats, StepUpdate
from tests.pseudo_model import PseudoRunner
from tests.worker.engine.engines import BLOCK_SIZE, NUM_BLOCKS, Recorder, make_request


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
    assert scheduler.policy.limits == StepLimits(max_num_batched_tokens=16, max_num_seqs=8)


def test_with_auto_tune_the_engine_does_what_it_says(caplog):
    with caplog.at_level("INFO", logger="holdfast.worker.engine.engine"):
        engine, scheduler = run_tuned(auto_tune=True)
    recommendations = engine.recommendations()
    engine.stop()
    assert scheduler.policy.limits.max_num_seqs == recommendations[0].recommended < 8
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

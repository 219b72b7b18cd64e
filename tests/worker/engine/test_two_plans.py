"""An engine over a device that runs a step while the next is planned: its time, its order, and what ends on the way."""

import random
import threading
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from holdfast.cluster.simulate.oracle.pseudo_model import EOS_TOKEN_ID
from holdfast.cluster.simulate.oracle.pseudo_runner import PseudoRunner as RichRunner
from holdfast.cluster.simulate.world.traffic import draw_requests
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.threaded_runner import ThreadedRunner
from holdfast.worker.errors import DeadlineExceededError, HoldfastError, ReplicaError
from holdfast.worker.plan.step_plan import NO_TOKEN, PENDING, StepPlan, StepResult
from holdfast.worker.request import EngineRequest, FinishReason, Priority, TokenDelta
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduling import step_in_flight
from holdfast.worker.scheduling.scheduler import Scheduler
from holdfast.worker.step_update import StepUpdate
from holdfast.worker.supervision.watchdog import Watchdog
from holdfast.worker.suspicion import Suspicion
from tests.pseudo_model import PseudoRunner, pseudo_completion
from tests.worker.fake_device import FakeDevice, VirtualClock

BLOCK_SIZE, VOCAB_SIZE, TIMEOUT_S = 4, 1000, 20


class Listener:
    """Remembers what it is told, which takes the host `host_s` each time."""

    def __init__(self, clock: VirtualClock, host_s: float = 0.0) -> None:
        self.deltas: dict[object, list[TokenDelta]] = defaultdict(list)
        self.ended: dict[object, FinishReason | HoldfastError] = {}
        self.failure: HoldfastError | None = None
        self._clock, self._host_s = clock, host_s

    def on_update(self, update: StepUpdate) -> None:
        self._clock.now += self._host_s
        for delta in update.deltas:
            assert delta.attempt not in self.ended, "nothing comes after the end"
            if self.deltas[delta.attempt]:
                assert delta.first_token_index == len(self.tokens(delta.attempt)), "no token twice, and none left out"
            self.deltas[delta.attempt].append(delta)
            if delta.finish_reason is not None:
                self.ended[delta.attempt] = delta.finish_reason
        for rejection in update.rejections:
            assert rejection.attempt not in self.ended
            self.ended[rejection.attempt] = rejection.error

    def on_failure(self, error: HoldfastError) -> None:
        self.failure = error

    def tokens(self, attempt: object) -> list[int]:
        return [token_id for delta in self.deltas[attempt] for token_id in delta.token_ids]

    def told(self, attempt: object) -> tuple[object, ...]:
        """All that a request was told, but for the steps in which it came."""
        deltas = self.deltas[attempt]
        return (
            self.tokens(attempt),
            [told for delta in deltas for told in delta.logprobs],
            [told for delta in deltas for told in delta.prompt_logprobs],
            str(self.ended.get(attempt)),
        )


class Turns:
    """An engine on this thread, in virtual time."""

    def __init__(
        self, model=None, *, two_plans=True, num_blocks=64, host_s=0.0, eos=(), caching=True, **config
    ) -> None:
        self.clock = VirtualClock()
        model = model or PseudoRunner(num_blocks, BLOCK_SIZE, VOCAB_SIZE)
        options = {name: config.pop(name) for name in ("step_s", "may_follow") if name in config}
        self.device = FakeDevice(model, BLOCK_SIZE, self.clock, **options)
        if not two_plans:
            self.device._may_follow = lambda plan: False
        self.scheduler = Scheduler(
            SchedulerConfig(**{"max_num_batched_tokens": 16, "max_num_seqs": 8, **config}),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=200,
            eos_token_ids=frozenset(eos),
            prefix_caching=caching,
        )
        self.engine = Engine(self.scheduler, self.device, clock=self.clock, idle_s=0.0)
        self.listener = Listener(self.clock, host_s)
        self.engine.attach(self.listener)
        self.turn()

    def submit(self, request_id: str, **wishes) -> None:
        self.engine.submit(make_request(request_id, **wishes), self.listener)

    def turn(self) -> None:
        self.engine._take_commands()
        self.engine._turn()
        self.engine._core.check_integrity()

    def run(self, num_turns=5000) -> None:
        for _ in range(num_turns):
            if not self.engine.has_work:
                break
            self.turn()

    def check_end(self) -> None:
        assert not self.engine.has_work
        stats = self.engine._core.stats()
        assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)


def make_request(
    request_id, prompt=(1, 2, 3), max_tokens=8, seed=7, time_left_s=None, priority=Priority.NORMAL, **more
):
    suspicion = more.pop("suspicion", Suspicion.NONE)
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, seed=seed, **more),
        time_left_s=time_left_s,
        priority=priority,
        suspicion=suspicion,
    )


def completion(num_tokens, prompt=(1, 2, 3), seed=7, stop=()):
    return pseudo_completion(prompt, seed, num_tokens, VOCAB_SIZE, stop)


# --- time ---


@pytest.mark.parametrize(("device_s", "host_s"), [(1.0, 0.25), (0.25, 1.0), (1.0, 1.0)])
def test_the_host_works_while_the_device_runs(device_s, host_s):
    num_tokens, took_s = 40, {}
    for two_plans in (False, True):
        turns = Turns(two_plans=two_plans, host_s=host_s, step_s=lambda plan: device_s)
        began_s = turns.clock.now
        turns.submit("r", max_tokens=num_tokens)
        turns.run()
        assert turns.listener.tokens("r") == completion(num_tokens)
        assert turns.device.most_in_flight == 1 + two_plans
        took_s[two_plans] = turns.clock.now - began_s
    assert took_s[False] == pytest.approx(num_tokens * (device_s + host_s))
    assert took_s[True] == pytest.approx(num_tokens * max(device_s, host_s) + min(device_s, host_s))


def test_each_step_is_timed_from_its_turn_on_the_device_and_progress_is_expected_of_that_one():
    turns = Turns(host_s=0.25, step_s=lambda plan: 2.0)
    turns.submit("r", max_tokens=33)
    turns.run()
    stats, progress = turns.engine._core.stats(), turns.engine.progress
    assert stats.step_time_s == pytest.approx(33 * 2.0, rel=0.02)
    progress.begin_step(1)
    assert progress.expected_gap_s == pytest.approx(2.0, rel=0.02)
    assert stats.commit_time_s == pytest.approx(33 * 0.25)


def test_a_request_that_comes_during_a_step_is_in_the_second_one_after_it():
    turns = Turns()
    turns.submit("first", max_tokens=9)
    turns.turn()
    turns.submit("second", max_tokens=3)
    turns.run()
    first_steps = [plan.step_id for plan in turns.device.plans if 1 in [share.sequence_id for share in plan.sequences]]
    assert first_steps[0] == 3
    assert turns.listener.tokens("second") == completion(3)


# --- what is planned ---


def test_a_plan_has_in_place_of_a_token_that_the_step_before_draws_that_it_is_pending():
    turns = Turns()
    turns.submit("r", max_tokens=4)
    turns.run()
    assert [share.token_ids for plan in turns.device.plans for share in plan.sequences] == [
        (1, 2, 3),
        *[(PENDING,)] * 3,
    ]
    assert [len(plan.decodes) for plan in turns.device.plans] == [0, 1, 1, 1]


def test_the_last_token_of_a_length_is_foreseen_and_nothing_is_planned_after_it():
    turns = Turns()
    turns.submit("r", max_tokens=5)
    turns.run()
    assert turns.device.num_launched == 5
    turns.check_end()


@pytest.mark.parametrize(
    "wishes",
    [{"presence_penalty": 0.5}, {"prompt_logprobs": 0, "prompt": range(40)}],
    ids=["penalty", "prompt logprobs"],
)
def test_who_needs_a_result_first_is_left_out_of_the_plan_ahead(wishes):
    turns = Turns(max_num_seqs=16)
    for number in range(9):
        turns.submit(f"plain{number}", max_tokens=30)
    turns.submit("waits", max_tokens=6, **wishes)
    turns.run()
    steps = [plan.step_id for plan in turns.device.plans if 9 in [share.sequence_id for share in plan.sequences]]
    if "presence_penalty" in wishes:
        assert all(later - earlier == 2 for earlier, later in pairwise(steps)), steps
    assert turns.device.num_ahead > 20
    assert turns.listener.tokens("waits") == completion(6, wishes.get("prompt", (1, 2, 3)))


def test_nothing_is_planned_ahead_that_would_hold_up_more_than_it_helps():
    turns = Turns()
    turns.submit("plain", max_tokens=20)
    turns.submit("waits", max_tokens=6, presence_penalty=0.5)
    turns.run()
    steps = [plan.step_id for plan in turns.device.plans if 1 in [share.sequence_id for share in plan.sequences]]
    assert steps == list(range(1, 7))
    assert turns.device.num_ahead == 20 - 6


def test_a_step_that_nothing_may_follow_is_collected_first():
    turns = Turns(may_follow=lambda plan: plan.step_id % 3 > 0)
    turns.submit("r", max_tokens=30)
    turns.run()
    assert turns.listener.tokens("r") == completion(30)
    assert turns.device.num_ahead == 20


# --- ends ---


def test_after_a_stop_token_the_token_of_the_step_ahead_is_thrown_away():
    stop = completion(6)[5]
    turns = Turns()
    turns.submit("r", max_tokens=20, stop_token_ids=(stop,))
    turns.run()
    assert (turns.listener.tokens("r"), turns.listener.ended["r"]) == (completion(6), FinishReason.STOP)
    assert turns.device.num_launched == 7
    turns.check_end()


def test_blocks_of_who_has_ended_are_free_once_the_step_ahead_is_done():
    stop = completion(6)[5]
    turns = Turns(caching=False)
    turns.submit("r", max_tokens=20, stop_token_ids=(stop,))
    while "r" not in turns.listener.ended:
        turns.turn()
    assert turns.engine.has_work
    assert turns.engine._core.stats().num_used_blocks == 3
    turns.turn()
    turns.check_end()


def test_an_abort_with_two_plans_in_flight_is_the_last_word():
    turns = Turns(num_blocks=8, caching=False)
    turns.submit("r", max_tokens=28)
    for _ in range(6):
        turns.turn()
    num_tokens = len(turns.listener.tokens("r"))
    turns.engine._launch_steps(turns.clock.now)
    assert turns.device.most_in_flight == 2
    turns.engine._core.abort("r")
    assert turns.engine._core.stats().num_used_blocks > 0
    turns.submit("next", max_tokens=28)
    turns.run()
    assert (turns.listener.tokens("r"), turns.listener.ended["r"]) == (completion(num_tokens), FinishReason.ABORT)
    assert turns.listener.tokens("next") == completion(28)
    turns.check_end()


def test_a_deadline_that_passes_with_two_plans_in_flight_ends_a_request_once():
    turns = Turns()
    turns.submit("late", max_tokens=100, time_left_s=5.0)
    turns.submit("patient", max_tokens=12)
    turns.run()
    assert isinstance(turns.listener.ended["late"], DeadlineExceededError)
    assert turns.listener.tokens("late") == completion(len(turns.listener.tokens("late")))
    assert turns.listener.tokens("patient") == completion(12)
    turns.check_end()


def test_nobody_is_preempted_before_a_result():
    turns = Turns(num_blocks=8, max_num_seqs=4)
    for number in range(4):
        turns.submit(f"r{number}", prompt=(number, 1, 2), max_tokens=20)
    turns.run()
    assert turns.engine._core.stats().num_preemptions > 0
    assert turns.device.num_ahead > 10
    for number in range(4):
        assert turns.listener.tokens(f"r{number}") == completion(20, (number, 1, 2))
    turns.check_end()


def test_a_better_class_gets_its_place_although_plans_ahead_preempt_nobody():
    turns = Turns(max_num_seqs=1)
    turns.submit("low", max_tokens=50, priority=Priority.LOW)
    for _ in range(3):
        turns.turn()
    turns.submit("critical", max_tokens=4, priority=Priority.CRITICAL)
    turns.run()
    assert list(turns.listener.ended) == ["critical", "low"]
    assert turns.listener.tokens("low") == completion(50)


class WithoutNumbers(PseudoRunner):
    """Has no token for the sequence `victim` in its step `step_id`."""

    victim, step_id = 1, 5

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        tokens = [
            (NO_TOKEN,) if (share.sequence_id, plan.step_id) == (self.victim, self.step_id) else drawn
            for share, drawn in zip(plan.sequences, result.token_ids, strict=True)
        ]
        return replace(result, token_ids=tuple(tokens))


def test_who_has_no_numbers_fails_alone_and_its_blocks_are_found_by_nobody():
    turns = Turns(WithoutNumbers(64, BLOCK_SIZE, VOCAB_SIZE))
    for number in range(3):
        turns.submit(f"r{number}", prompt=(number, *range(9)), max_tokens=12)
    turns.run()
    assert "no numbers" in str(turns.listener.ended["r1"])
    for number in (0, 2):
        assert turns.listener.tokens(f"r{number}") == completion(12, (number, *range(9)))
    assert turns.scheduler._allocator.num_cached == 2 * 5
    turns.check_end()


def test_the_first_token_says_what_was_cached_and_how_long_it_waited():
    turns = Turns(max_num_seqs=1, max_num_batched_tokens=64)
    for name in ("first", "second"):
        turns.submit(name, prompt=range(30), max_tokens=5)
    turns.run()
    first, second = (turns.listener.deltas[name] for name in ("first", "second"))
    assert [delta.num_cached_tokens for delta in first + second] == [0] * 5 + [28] + [0] * 4
    assert [delta.queued_s > 0 for delta in first + second] == [False] * 5 + [True] + [False] * 4


def test_a_suspect_is_told_of_before_a_step_ahead_runs_it():
    turns = Turns()
    other = Listener(turns.clock)
    turns.engine.attach(other)
    turns.submit("first", max_tokens=9)
    turns.turn()
    num_known = []
    launch = turns.device.launch
    other.on_update = lambda update: num_known.append(update.load.num_foreign_suspects)
    turns.device.launch = lambda plan: (num_known.append(f"step {plan.step_id}"), launch(plan))
    turns.submit("suspect", max_tokens=9, suspicion=Suspicion.SUSPECT)
    turns.turn()
    assert num_known[num_known.index("step 3") - 1] == 1


# --- all kinds of requests ---


def mixed_load(seed: int) -> list[tuple[float, EngineRequest]]:
    """Arrivals of requests of every kind, some of several completions."""
    rng, arrivals = random.Random(seed), []
    for planned in draw_requests(rng, 25, 30.0, 100):
        request = planned.request
        if planned.is_poison:
            continue
        for index in range(request.sampling_params.n):
            params = request.sampling_params.with_changes(n=1, seed=request.sampling_params.seed + index)
            one = replace(request, request_id=f"{request.request_id}.{index}", sampling_params=params)
            arrivals.append((planned.arrival_s, replace(one, group_id=request.request_id) if index else one))
    return sorted(arrivals, key=lambda arrival: arrival[0])


def serve(seed: int, *, two_plans: bool) -> Turns:
    rng = random.Random(seed)
    num_blocks = rng.choice((26, 40, 400))
    config = {"max_num_seqs": rng.choice((3, 12, 32)), "max_num_batched_tokens": rng.choice((5, 64))}
    model, caching = RichRunner(num_blocks, BLOCK_SIZE), rng.random() < 0.7
    can_follow = rng.choice((1.0, 0.7))
    turns = Turns(
        model,
        two_plans=two_plans,
        num_blocks=num_blocks,
        eos=(EOS_TOKEN_ID,),
        caching=caching,
        step_s=lambda plan: 0.2 + 0.01 * plan.num_tokens,
        may_follow=lambda plan: hash((seed, plan.step_id)) % 10 < 10 * can_follow,
        **config,
    )
    arrivals = mixed_load(seed)
    while arrivals or turns.engine.has_work:
        if not turns.engine.has_work:
            turns.clock.now = max(turns.clock.now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= turns.clock.now:
            turns.engine.submit(arrivals.pop(0)[1], turns.listener)
        turns.turn()
    turns.check_end()
    return turns


@pytest.mark.parametrize(
    "seeds", [range(16), pytest.param(range(16, 400), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_all_kinds_of_requests_are_told_the_same_with_one_plan_in_flight_and_with_two(seeds, monkeypatch):
    num_ahead = num_pending = num_preemptions = num_forked = num_hits = 0
    for seed in seeds:
        monkeypatch.setattr(step_in_flight, "MAX_SHARE_HELD_UP", 1.0 if seed % 2 else 0.125)
        one, two = serve(seed, two_plans=False), serve(seed, two_plans=True)
        assert one.device.most_in_flight == 1
        assert one.listener.ended.keys() == two.listener.ended.keys() == {r.request_id for _, r in mixed_load(seed)}
        for attempt in one.listener.ended:
            assert one.listener.told(attempt) == two.listener.told(attempt), f"seed {seed}, {attempt}"
        stats = two.engine._core.stats()
        num_ahead, num_pending = num_ahead + two.device.num_ahead, num_pending + two.device.num_pending
        num_preemptions += stats.num_preemptions
        num_forked, num_hits = num_forked + stats.num_forked_tokens, num_hits + stats.num_prefix_hit_tokens
    assert min(num_ahead, num_pending, num_preemptions, num_forked, num_hits) > 0


# --- the engine's own thread ---


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
    assert engine._core.stats().num_used_blocks == 0


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
    assert engine.between_steps(lambda: engine._core.stats().num_used_blocks).result(TIMEOUT_S) == 0
    engine.stop()


def test_steps_on_a_thread_of_their_own_give_the_same_tokens():
    engine, recorder = threaded_engine(ThreadedRunner(PseudoRunner(64, BLOCK_SIZE, VOCAB_SIZE)))
    for number in range(12):
        engine.submit(make_request(f"r{number}", prompt=range(number + 1), seed=number, max_tokens=20), recorder)
    recorder.wait_for(lambda: len(recorder.ended) == 12)
    for number in range(12):
        assert recorder.tokens(f"r{number}") == completion(20, range(number + 1), number)
    engine.stop()


def test_a_step_that_fails_on_its_thread_ends_the_engine():
    class Broken(PseudoRunner):
        def run(self, plan: StepPlan) -> StepResult:
            if plan.step_id == 4:
                raise RuntimeError("connection closed by peer")
            return super().run(plan)

    model = Broken(64, BLOCK_SIZE, VOCAB_SIZE)
    engine, recorder = threaded_engine(ThreadedRunner(model))
    engine.submit(make_request("r", max_tokens=50), recorder)
    recorder.wait_for(lambda: recorder.failure is not None)
    assert "connection closed by peer" in str(recorder.failure)
    assert recorder.tokens("r") == completion(3)
    engine.stop()
    assert model.closed

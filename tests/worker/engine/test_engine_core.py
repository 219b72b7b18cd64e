"""The engine's core, turn by turn: who is told what, and when."""

import pytest

from holdfast.worker.engine.engine_core import EngineCore
from holdfast.worker.errors import DeadlineExceededError, InvalidRequestError
from holdfast.worker.request import FinishReason
from holdfast.worker.scheduler.acceptance import NUM_FIRST_PREFILLS
from tests.worker.schedulers import BLOCK_SIZE, make_request, make_result, make_scheduler


class Listener:
    """One to whom the tests tell things themselves."""


def step(core: EngineCore, *, step_s: float = 0.1, now: float = 0.0) -> dict[Listener, object]:
    """One turn, if there is something to do; returns what each listener must be told."""
    plan = core.scheduler.plan(now)
    if plan is not None:
        core.commit(plan, make_result(plan), step_s)
    return dict(core.take_updates())


@pytest.fixture
def core():
    core = EngineCore(make_scheduler())
    yield core
    core.check_integrity()


@pytest.fixture
def listener(core):
    listener = Listener()
    core.attach(listener)
    core.take_updates()
    return listener


def test_each_listener_is_told_of_its_own_requests_once(core, listener):
    other = Listener()
    core.attach(other)
    core.submit(make_request("mine", max_tokens=2), listener, 0.0)
    core.submit(make_request("theirs", max_tokens=1), other, 0.0)
    first, second = step(core), step(core)
    heard = [[delta.attempt for delta in news[who].deltas] for news in (first, second) for who in (listener, other)]
    assert heard == [["mine"], ["theirs"], ["mine"], []]
    assert second[listener].deltas[0].finish_reason is FinishReason.LENGTH


def test_nobody_is_told_anything_twice_or_without_need(core, listener):
    core.submit(make_request("r", max_tokens=1), listener, 0.0)
    assert step(core)[listener].deltas
    assert core.take_updates() == []
    assert step(core) == {}


def test_tokens_and_a_rejection_are_told_together(core, listener):
    core.submit(make_request("runs"), listener, 0.0)
    core.submit(make_request("runs"), listener, 0.0)
    update = step(core)[listener]
    assert [delta.attempt for delta in update.deltas] == ["runs"]
    assert [type(rejection.error) for rejection in update.rejections] == [InvalidRequestError]


def test_a_request_whose_time_is_up_is_rejected_before_the_next_step(core, listener):
    core.submit(make_request("late", time_left_s=5.0), listener, 0.0)
    step(core)
    (rejection,) = step(core, now=5.0)[listener].rejections
    assert (rejection.attempt, type(rejection.error)) == ("late", DeadlineExceededError)
    assert not core.scheduler.has_work


def test_one_who_leaves_takes_its_requests_along_and_the_others_hear_of_the_load(core, listener):
    other = Listener()
    core.attach(other)
    core.submit(make_request("theirs", max_tokens=50), other, 0.0)
    assert step(core)[listener].load.num_running == 1
    core.detach(other)
    message = step(core)
    assert (message.keys(), message[listener].load.num_running) == ({listener}, 0)


def test_a_request_of_one_who_has_left_is_counted_and_not_run(core, listener):
    core.detach(listener)
    core.submit(make_request("r"), listener, 0.0)
    assert (core.scheduler.stats().num_requests, core.scheduler.has_work) == (1, False)


def test_a_commit_says_how_many_tokens_were_gained(core, listener):
    for i in range(3):
        core.submit(make_request(f"r{i}"), listener, 0.0)
    plan = core.scheduler.plan(0.0)
    assert core.commit(plan, make_result(plan), 0.25) == 3
    assert (core.scheduler.stats().num_tokens_generated, core.scheduler.stats().step_time_s) == (3, 0.25)


def test_the_integrity_check_sees_a_request_that_nobody_waits_for(core, listener):
    core.submit(make_request("r"), listener, 0.0)
    core._output_queues.pop(listener)
    with pytest.raises(AssertionError, match=r"no listener has the requests \['r'\]"):
        core.check_integrity()
    core.abort("r")


def is_dropped(core: EngineCore, listener: Listener, *, prompt_len: int, time_left_s: float) -> bool:
    """Whether a request is given up before it has begun."""
    core.submit(make_request("asks", prompt_len=prompt_len, time_left_s=time_left_s), listener, 0.0)
    return bool(step(core)[listener].rejections)


def test_small_steps_do_not_say_that_a_long_prompt_is_hopeless(core, listener):
    core.submit(make_request("small", prompt_len=1), listener, 0.0)
    for _ in range(3):
        step(core, step_s=0.1)  # 10 tokens a second, for there is nothing more to do
    assert not is_dropped(core, listener, prompt_len=60, time_left_s=5.0)


def test_full_steps_say_that_a_long_prompt_is_hopeless(core, listener):
    core.submit(make_request("fills a step", prompt_len=32), listener, 0.0)
    step(core, step_s=3.2)
    assert is_dropped(core, listener, prompt_len=60, time_left_s=5.0)


def test_nothing_is_kept_of_the_cache_while_nobody_follows_it():
    core, listener = EngineCore(scheduler := make_scheduler(prefix_caching=True)), Listener()
    core.attach(listener)
    core.submit(make_request("before", prompt_len=BLOCK_SIZE, max_tokens=1), listener, 0.0)
    assert not step(core)[listener].cache
    core.follow_cache(listener)
    assert len(step(core)[listener].cache.stored) == 1
    core.detach(listener)
    scheduler.prefix_cache.take_events = None  # to call it would be an error
    core.attach(listener)
    core.submit(make_request("after", prompt_len=BLOCK_SIZE, max_tokens=1), listener, 0.0)
    assert not step(core)[listener].cache


def test_the_speed_of_prefill_is_the_best_of_late_once_there_were_enough_steps():
    core = EngineCore(make_scheduler(num_blocks=64, max_num_batched_tokens=128, max_num_seqs=4))
    listener = Listener()
    core.attach(listener)

    def speed_after(number: int, step_s: float) -> float:
        core.submit(make_request(f"{number}", prompt_len=80, max_tokens=1), listener, 0.0)
        step(core, step_s=step_s)
        return core.scheduler.stats().prefill_tokens_per_s

    assert [speed_after(number, 10.0) for number in range(NUM_FIRST_PREFILLS - 1)] == [0.0] * (NUM_FIRST_PREFILLS - 1)
    assert speed_after(100, 0.1) == 800.0, "the first, slow ones are forgotten at once"
    assert speed_after(101, 0.05) == 1600.0
    assert 0.98 * 1600.0 < speed_after(102, 1.0) < 1600.0
    core.submit(make_request("short", max_tokens=1), listener, 0.0)
    before = core.scheduler.stats().prefill_tokens_per_s
    step(core, step_s=1e-6)
    assert core.scheduler.stats().prefill_tokens_per_s == before, "few tokens say nothing"

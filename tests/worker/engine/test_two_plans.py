"""An engine over a device that runs a step while the next is planned: its time, what it plans, and the same words."""

from itertools import pairwise

import pytest

from holdfast.worker.request import PoisonRisk
from holdfast.worker.scheduler import planned_step
from holdfast.worker.step_plan import PENDING
from tests.worker.engine.two_plans import Listener, Turns, completion, mixed_load, serve

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
    stats, progress = turns.engine._core.scheduler.stats(), turns.engine.progress
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
    turns.submit("suspect", max_tokens=9, poison_risk=PoisonRisk.SUSPECT)
    turns.turn()
    assert num_known[num_known.index("step 3") - 1] == 1


# --- all kinds of requests ---


@pytest.mark.parametrize(
    "seeds", [range(16), pytest.param(range(16, 400), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_all_kinds_of_requests_are_told_the_same_with_one_plan_in_flight_and_with_two(seeds, monkeypatch):
    num_ahead = num_pending = num_preemptions = num_forked = num_hits = 0
    for seed in seeds:
        monkeypatch.setattr(planned_step, "MAX_SHARE_HELD_UP", 1.0 if seed % 2 else 0.125)
        one, two = serve(seed, two_plans=False), serve(seed, two_plans=True)
        assert one.device.most_in_flight == 1
        assert one.listener.ended.keys() == two.listener.ended.keys() == {r.request_id for _, r in mixed_load(seed)}
        for attempt in one.listener.ended:
            assert one.listener.output_of(attempt) == two.listener.output_of(attempt), f"seed {seed}, {attempt}"
        stats = two.engine._core.scheduler.stats()
        num_ahead, num_pending = num_ahead + two.device.num_ahead, num_pending + two.device.num_pending
        num_preemptions += stats.num_preemptions
        num_forked, num_hits = num_forked + stats.num_forked_tokens, num_hits + stats.num_prefix_hit_tokens
    assert min(num_ahead, num_pending, num_preemptions, num_forked, num_hits) > 0

"""Plain decodes are planned as rows, and rows say what shares of their own would say."""

from dataclasses import replace

import pytest

from holdfast.worker.request import FinishReason
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_plan import NO_ROWS, NO_TOKEN, StepPlan, StepResult
from tests.worker.schedulers import BLOCK_SIZE, EOS, dropped, make_request, make_result, make_scheduler


def decoding(num_requests: int) -> Scheduler:
    """A scheduler whose requests have each drawn their first token."""
    scheduler = make_scheduler()
    for number in range(num_requests):
        scheduler.add(make_request(f"r{number}", prompt_len=3 + number, max_tokens=40))
    turn(scheduler)
    return scheduler


def two_alike() -> Scheduler:
    """A scheduler with two requests that decode, with room in their blocks."""
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add(make_request(name, prompt_len=3, max_tokens=40))
    turn(scheduler)
    return scheduler


def turn(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    check(scheduler, plan)
    scheduler.commit(plan, make_result(plan))
    scheduler.check_integrity()
    return plan


def check(scheduler: Scheduler, plan: StepPlan) -> None:
    """Each share is what its sequence says, whether it is planned as a row or not."""
    alive = {sequence.sequence_id: sequence for sequence in scheduler._sequences.values()}
    for number, share in enumerate(plan.sequences):
        sequence = alive[share.sequence_id]
        end = share.first_position + len(share.token_ids)
        assert share.first_position == sequence.num_computed_tokens
        assert list(share.token_ids) == sequence.token_ids[share.first_position : end]
        assert share.block_ids == sequence.block_ids[: -(-end // scheduler._allocator.block_size)]
        if end == len(sequence.token_ids):
            assert share.draw == sequence.draw_params()
        assert (number < len(plan.decodes)) == sequence.decodes_plainly


def num_rows(plan: StepPlan) -> int:
    return len(plan.decodes)


def test_requests_that_decode_are_rows_step_after_step():
    scheduler = decoding(3)
    for _ in range(20):
        plan = turn(scheduler)
        assert (num_rows(plan), len(plan.others), plan.num_tokens) == (3, 0, 3)


def test_columns_are_made_once_as_long_as_nobody_joins_or_leaves():
    scheduler = decoding(2)
    columns = turn(scheduler).decodes.columns
    assert all(turn(scheduler).decodes.columns is columns for _ in range(9))
    scheduler.add(make_request("late", prompt_len=4))
    mixed = turn(scheduler)
    assert (num_rows(mixed), len(mixed.others)) == (2, 1)
    assert num_rows(turn(scheduler)) == 3


def test_a_plan_stays_as_it_is_when_the_next_ones_are_made():
    scheduler, other = decoding(3), decoding(3)
    plans, shares = [], []
    for _ in range(10):
        plans.append(turn(scheduler))
        shares.append(turn(other).sequences)
    assert [plan.sequences for plan in plans] == shares


@pytest.mark.parametrize("params", [{"presence_penalty": 0.5}, {"bad_words": ("x",)}, {"logit_bias": {5: 1.0}}])
def test_what_looks_at_more_than_its_position_is_a_share_of_its_own(params):
    scheduler = make_scheduler()
    scheduler.add(make_request("plain", prompt_len=3))
    request = make_request("other", prompt_len=3)
    request = replace(
        request,
        sampling_params=request.sampling_params.with_changes(**params),
        bad_word_token_ids=((7,),) if "bad_words" in params else (),
    )
    scheduler.add(request)
    scheduler.add(make_request("another", prompt_len=3))
    turn(scheduler)
    for _ in range(5):
        plan = turn(scheduler)
        assert (num_rows(plan), len(plan.others)) == (2, 1)
        assert [share.sequence_id for share in plan.sequences] == [0, 2, 1]


def test_a_request_that_is_aborted_in_mid_step_gains_nothing_and_the_others_go_on():
    scheduler = decoding(3)
    plan = scheduler.plan()
    assert scheduler.abort("r1").finish_reason is FinishReason.ABORT
    deltas = scheduler.commit(plan, make_result(plan))
    assert [delta.attempt for delta in deltas] == ["r0", "r2"]
    scheduler.check_integrity()
    assert num_rows(turn(scheduler)) == 2


def test_a_row_without_a_token_breaks_its_request_alone():
    scheduler = decoding(3)
    plan = scheduler.plan()
    result = StepResult(step_id=plan.step_id, token_ids=((7,), (NO_TOKEN,), (7,)))
    assert [delta.attempt for delta in scheduler.commit(plan, result)] == ["r0", "r2"]
    assert dropped(scheduler) == ["r1"]
    scheduler.check_integrity()
    assert num_rows(turn(scheduler)) == 2


def test_rows_that_end_report_why():
    scheduler = make_scheduler()
    scheduler.add(make_request("stops", prompt_len=3, max_tokens=40))
    scheduler.add(make_request("is full", prompt_len=3, max_tokens=3))
    turn(scheduler)
    turn(scheduler)
    plan = scheduler.plan()
    deltas = scheduler.commit(plan, StepResult(step_id=plan.step_id, token_ids=((EOS,), (7,))))
    assert [delta.finish_reason for delta in deltas] == [FinishReason.STOP, FinishReason.LENGTH]
    assert [delta.first_token_index for delta in deltas] == [2, 2]
    assert scheduler.plan() is None


def test_a_preempted_request_comes_back_as_a_row():
    scheduler = make_scheduler(num_blocks=6)
    for name in ("a", "b"):
        scheduler.add(make_request(name, prompt_len=7, max_tokens=12))
    rows = []
    while scheduler.has_work:
        rows.append(num_rows(turn(scheduler)))
    assert scheduler.stats().num_preemptions > 0
    assert rows.count(2) > 1
    assert rows[-1] == 1


def test_a_plan_whose_rows_were_replaced_by_shares_of_their_own_is_committed_as_it_is():
    """As where a draft model has guessed: rows are then not where their columns say."""
    scheduler = two_alike()
    turn(scheduler)
    plan = scheduler.plan()
    shares = [replace(share, token_ids=(*share.token_ids, 7, 8), num_draws=3) for share in plan.sequences]
    result = StepResult(step_id=plan.step_id, token_ids=((7, 8, 9), (7, 7, 7)))
    deltas = scheduler.commit(replace(plan, decodes=NO_ROWS, others=tuple(shares)), result)
    assert [delta.token_ids for delta in deltas] == [(7, 8, 9), (7, 7)]
    scheduler.check_integrity()
    assert num_rows(turn(scheduler)) == 2


def test_every_block_that_a_row_fills_is_cached():
    scheduler = make_scheduler(prefix_caching=True)
    for number in range(3):
        scheduler.add(make_request(f"r{number}", prompt=(50, 1, 2, 3, 4)[number:], max_tokens=40))
    for _ in range(20):
        turn(scheduler)
        for sequence in scheduler._queues.running:
            filled = sequence.block_ids[: sequence.num_computed_tokens // BLOCK_SIZE]
            assert all(block_id in scheduler._allocator.prefix_cache.contents for block_id in filled)


def test_tenants_pay_for_what_their_rows_gain():
    scheduler = make_scheduler()
    for name, tenant in (("a", "gold"), ("b", "iron"), ("c", "gold")):
        scheduler.add(make_request(name, prompt_len=3, tenant=tenant, max_tokens=40))
    turn(scheduler)
    gold, iron = (scheduler._sequences[name].tenant for name in ("a", "b"))
    before = gold.counter, iron.counter
    turn(scheduler)
    assert (gold.counter - before[0], iron.counter - before[1]) == (4, 2)
    plan = scheduler.plan()
    scheduler.abort("c")
    scheduler.commit(plan, make_result(plan))
    assert (gold.counter - before[0], iron.counter - before[1]) == (6, 4)

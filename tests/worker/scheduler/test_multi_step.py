"""Plans of several steps: only where nobody waits, ends or needs a block before; and what becomes of their tokens."""

import pytest

from holdfast.worker.engine.steps_in_flight import PLAN_LIMIT_S, RunLength
from holdfast.worker.request import FinishReason
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_plan import NO_TOKEN, StepPlan, StepResult
from tests.worker.schedulers import BLOCK_SIZE, EOS, dropped, make_request, make_result, make_scheduler


def greedy(name: str, **changes):
    return make_request(name, **{"max_tokens": 40, "temperature": 0.0, "prompt_len": BLOCK_SIZE, **changes})


def decoding(*requests, **settings) -> Scheduler:
    """A scheduler whose requests have each drawn their first token; then one block is new, with one token in it."""
    scheduler = make_scheduler(**settings)
    for request in requests:
        scheduler.add(request)
    plan = scheduler.plan()
    scheduler.commit(plan, make_result(plan))
    return scheduler


def commit(scheduler: Scheduler, plan: StepPlan, *rows: tuple[int, ...]):
    """`rows` are tokens of the first sequences; the others draw sevens."""
    rest = [(7,) * plan.num_steps] * (len(plan.sequences) - len(rows))
    deltas = scheduler.commit(plan, StepResult(step_id=plan.step_id, token_ids=(*rows, *rest)))
    scheduler.check_integrity()
    return deltas


def test_decodes_go_on_to_the_end_of_the_block():
    scheduler = decoding(greedy("a"), greedy("b"))
    plan = scheduler.plan(max_steps=8)
    assert plan.num_steps == BLOCK_SIZE
    assert plan.num_tokens == 2 * BLOCK_SIZE
    deltas = commit(scheduler, plan, (1, 2, 3, 4), (5, 6, 7, 8))
    assert [delta.token_ids for delta in deltas] == [(1, 2, 3, 4), (5, 6, 7, 8)]
    assert [delta.first_token_index for delta in deltas] == [1, 1]
    again = scheduler.plan(max_steps=3)
    assert again.num_steps == 3
    assert again.sequences[1].first_position == 2 * BLOCK_SIZE
    assert list(again.decodes.token_ids) == [4, 8]
    assert scheduler.stats().num_steps == 1 + BLOCK_SIZE + 1, "a plan that is not committed counts as a step"


def test_nobody_is_asked_for_more_than_it_may_have():
    scheduler = decoding(greedy("a", max_tokens=3), greedy("b"))
    plan = scheduler.plan(max_steps=8)
    assert plan.num_steps == 2
    ended, _ = commit(scheduler, plan)
    assert ended.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "other",
    [
        greedy("b", temperature=0.7),
        greedy("b", logprobs=1),
        greedy("b", repetition_penalty=1.2),
        greedy("b", prompt_len=40),  # its prompt takes several steps
    ],
    ids=["warm", "logprobs", "penalty", "prompt"],
)
def test_one_step_where_somebody_needs_more_than_the_argmax_or_has_a_prompt(other):
    scheduler = decoding(greedy("a"), other)
    assert scheduler.plan(max_steps=8).num_steps == 1


def test_one_step_while_somebody_waits():
    scheduler = decoding(greedy("a"), greedy("b"), max_num_seqs=1)
    assert scheduler.plan(max_steps=8).num_steps == 1


def test_who_stops_early_gets_nothing_behind_its_end():
    scheduler = decoding(greedy("a"), greedy("b"))
    a, b = commit(scheduler, scheduler.plan(max_steps=8), (1, EOS, 9, 9), (5, 6, 7, 8))
    assert a.token_ids == (1, EOS)
    assert a.finish_reason is FinishReason.STOP
    assert b.token_ids == (5, 6, 7, 8)
    plan = scheduler.plan(max_steps=8)
    assert [sequence.token_ids for sequence in plan.sequences] == [(8,)]


def test_a_row_without_numbers_is_found_again_as_the_first_of_a_step():
    scheduler = decoding(greedy("a"), greedy("b"))
    deltas = commit(scheduler, scheduler.plan(max_steps=8), (1, NO_TOKEN, NO_TOKEN, NO_TOKEN))
    assert [delta.token_ids for delta in deltas] == [(1,), (7, 7, 7, 7)]
    plan = scheduler.plan(max_steps=8)
    positions = [sequence.first_position for sequence in plan.sequences]
    assert positions == [BLOCK_SIZE + 1, 2 * BLOCK_SIZE]
    commit(scheduler, plan, (NO_TOKEN,) * plan.num_steps)
    assert dropped(scheduler) == ["a"]


def test_one_that_is_aborted_meanwhile_gets_nothing():
    scheduler = decoding(greedy("a"), greedy("b"))
    plan = scheduler.plan(max_steps=8)
    scheduler.abort("a")
    (delta,) = commit(scheduler, plan)
    assert (delta.attempt, len(delta.token_ids)) == ("b", BLOCK_SIZE)


def test_blocks_that_are_filled_are_cached_as_by_single_steps():
    cached = []
    for max_steps in (1, 8):
        scheduler = decoding(greedy("a", max_tokens=14), prefix_caching=True)
        while scheduler.has_work:
            commit(scheduler, scheduler.plan(max_steps=max_steps))
        cached.append(sorted(scheduler.prefix_cache.block_hashes))
    assert cached[0] == cached[1]
    assert len(cached[0]) == 4


def test_tenants_are_charged_for_each_token():
    charged = []
    for max_steps in (1, 8):
        scheduler = decoding(greedy("a", tenant="gold"), greedy("b", tenant="tin"), tenant_shares={"gold": 2.0})
        for _ in range(BLOCK_SIZE // max_steps or 1):
            commit(scheduler, scheduler.plan(max_steps=max_steps))
        charged.append([sequence.tenant.counter for sequence in scheduler._sequences.values()])
    assert charged[0] == charged[1]


class Runner:
    """Runs several steps, or not."""

    def __init__(self, runs_several_steps: bool = True) -> None:
        self.runs_several_steps = runs_several_steps


def length_after(plan_s: float, *, most: int = 8, **runner: bool) -> int:
    scheduler = decoding(greedy("a"))
    length = RunLength(Runner(**runner), most)
    assert length.max_steps == 1
    plan = scheduler.plan(max_steps=4)
    length.observe(plan, plan_s)
    return length.max_steps


def test_a_plan_is_for_as_many_steps_as_the_limit_of_time_holds():
    assert length_after(4 * PLAN_LIMIT_S / 3.5) == 3
    assert length_after(4 * PLAN_LIMIT_S / 100) == 8
    assert length_after(4 * PLAN_LIMIT_S / 100, most=5) == 5
    assert length_after(4 * PLAN_LIMIT_S * 2) == 1


def test_one_step_with_a_runner_that_takes_no_more_or_after_a_prompt():
    assert length_after(4 * PLAN_LIMIT_S / 100, most=1) == 1
    assert length_after(4 * PLAN_LIMIT_S / 100, runs_several_steps=False) == 1
    scheduler = make_scheduler()
    scheduler.add(greedy("a"))
    length = RunLength(Runner(), 8)
    length.observe(scheduler.plan(), 1e-9)
    assert length.max_steps == 1

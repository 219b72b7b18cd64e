"""A token that the step before draws is found by its sequence, wherever this is in the two plans."""

import random
from dataclasses import replace

import pytest

from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.pending_tokens import KNOWN, drawing_rows, has_pending, with_tokens
from holdfast.worker.scheduler import planned_step
from holdfast.worker.step_plan import NO_TOKEN, PENDING, StepPlan, StepResult
from tests.worker.schedulers import make_request, make_scheduler


def pairs_of_plans(seed: int, num_steps: int = 30) -> list[tuple[StepPlan, StepPlan]]:
    """Each step and the one that was planned ahead after it; every draw is another token."""
    rng = random.Random(seed)
    scheduler = make_scheduler(max_num_batched_tokens=20, max_num_seqs=24, num_blocks=200)
    pairs, before = [], None
    for step in range(num_steps):
        for number in range(rng.choice((0, 0, 1, 3))):
            wishes = rng.choice(({}, {"logit_bias": {3: 1.0}}, {"presence_penalty": 0.5}))
            request = make_request(
                f"{step}.{number}", prompt_len=rng.randint(1, 30), max_tokens=rng.randint(1, 9), **wishes
            )
            scheduler.add(request)
        before = before or scheduler.plan()
        if before is None:
            continue
        ahead = scheduler.plan_ahead()
        if ahead is not None:
            pairs.append((before, ahead))
        scheduler.commit(before, result_of(before))
        before = ahead
    return pairs


def result_of(plan: StepPlan) -> StepResult:
    drawn = tuple((1000 * plan.step_id + share.sequence_id,) * share.num_draws for share in plan.sequences)
    return StepResult(step_id=plan.step_id, token_ids=drawn)


@pytest.fixture(params=range(3))
def pairs(request, monkeypatch):
    monkeypatch.setattr(planned_step, "MAX_SHARE_HELD_UP", 1.0)
    pairs = pairs_of_plans(request.param)
    assert sum(has_pending(ahead) for _, ahead in pairs) > 10
    assert any(PENDING in share.token_ids for _, ahead in pairs for share in ahead.others)
    return pairs


def test_each_pending_token_is_the_one_that_its_sequence_draws(pairs):
    for before, ahead in pairs:
        known = with_tokens(ahead, before, result_of(before))
        assert not has_pending(known)
        for share, was in zip(known.sequences, ahead.sequences, strict=True):
            drawn = 1000 * before.step_id + share.sequence_id
            assert share == replace(was, token_ids=tuple(drawn if t == PENDING else t for t in was.token_ids))


def test_packed_for_a_device_it_says_the_row_that_draws_it(pairs):
    for before, ahead in pairs:
        drawn = [token for tokens in result_of(before).token_ids for token in tokens]
        known = with_tokens(ahead, before, result_of(before))
        batch = StepBatch.of(ahead, before=before)
        assert batch.has_pending == has_pending(ahead)
        put_in = [token if token >= 0 else drawn[-1 - token] for token in batch.token_ids.tolist()]
        assert put_in == [token for share in known.sequences for token in share.token_ids]
        assert [row == KNOWN for row in drawing_rows(ahead, before)] == [
            token != PENDING for share in ahead.sequences for token in share.token_ids
        ]


def test_after_a_row_without_a_token_any_will_do_that_the_model_has(pairs):
    before, ahead = next(pair for pair in pairs if has_pending(pair[1]))
    none = replace(result_of(before), token_ids=tuple((NO_TOKEN,) * share.num_draws for share in before.sequences))
    known = with_tokens(ahead, before, none)
    assert min(token for share in known.sequences for token in share.token_ids) == 0


def test_a_plan_without_pending_tokens_stays_what_it_is(pairs):
    plan, _ = pairs[0]
    assert with_tokens(plan, None, None) is plan

"""Pooled requests of whole prompts, where a step is planned while another is in flight: each is computed once."""

from holdfast.worker.config import SchedulerConfig
from holdfast.worker.pooling import PoolingKind, PoolingParams
from holdfast.worker.request import EngineRequest, FinishReason
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_plan import StepResult


def scheduler_of(num_requests: int) -> Scheduler:
    """Two prompts fill a step."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=8),
        num_blocks=64,
        block_size=4,
        max_model_len=64,
        eos_token_ids=frozenset(),
        pooling=PoolingKind.MEAN,
        whole_prompts=True,
    )
    for number in range(num_requests):
        request = EngineRequest(
            request_id=str(number),
            prompt_token_ids=(1, 2, 3, 4),
            sampling_params=SamplingParams(max_tokens=1, seed=0),
            pooling=PoolingParams(),
        )
        scheduler.add(request, 0.0)
    return scheduler


def numbers_in(plan):
    return [share.sequence_id for share in plan.sequences]


def committed(scheduler, plan):
    """The results that a step's commit tells, by request."""
    pooled = {number: bytes([number]) for number in numbers_in(plan)}
    result = StepResult(step_id=plan.step_id, token_ids=((),) * len(pooled), pooled=pooled)
    return {delta.attempt: (delta.pooled, delta.finish_reason) for delta in scheduler.commit(plan, result)}


def test_the_next_step_has_the_prompts_that_the_one_in_flight_does_not_have():
    scheduler = scheduler_of(5)
    plans, results = [scheduler.plan()], {}
    while plans:
        if (ahead := scheduler.plan_ahead()) is not None:
            plans.append(ahead)
        assert all(share.pool is not None and len(share.token_ids) == 4 for plan in plans for share in plan.sequences)
        assert not plans[1:] or not set(numbers_in(plans[0])) & set(numbers_in(plans[1]))
        results |= committed(scheduler, plans.pop(0))
    assert len(results) == 5
    assert {reason for _, reason in results.values()} == {FinishReason.STOP}
    scheduler.check_integrity()
    assert not scheduler.has_work


def test_one_that_is_aborted_in_flight_gives_its_blocks_back_and_tells_nothing():
    scheduler = scheduler_of(3)
    first, second = scheduler.plan(), scheduler.plan_ahead()
    assert scheduler.abort("0") is not None
    assert len(committed(scheduler, first)) == 1
    assert len(committed(scheduler, second)) == 1
    scheduler.check_integrity()
    assert not scheduler.has_work

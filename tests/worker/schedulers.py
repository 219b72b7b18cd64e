"""Requests and steps for the tests of the scheduler and its policies: every draw is a token of the test's choice."""

from holdfast.worker.config import SchedulerConfig, SpeculationConfig
from holdfast.worker.request import EngineRequest, Priority, TokenDelta
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.speculation import Speculation
from holdfast.worker.step_plan import StepPlan, StepResult

EOS, BLOCK_SIZE = 0, 4


def make_scheduler(
    num_blocks=64, max_model_len=100, prefix_caching=False, speculation=None, make_policy=None, **config
):
    """Without prefix caching unless asked for: all prompts begin alike here, and are to be computed all the same.

    `speculation` is a proposer, or settings.
    """
    settings = SchedulerConfig(**{"max_num_batched_tokens": 32, "max_num_seqs": 8, **config})
    if speculation is not None:
        proposer = None if isinstance(speculation, SpeculationConfig) else speculation
        chosen = SpeculationConfig(speculative="ngram") if proposer else speculation
        speculation = Speculation(chosen, settings, proposer)
    return Scheduler(
        settings,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS}),
        prefix_caching=prefix_caching,
        drafter=speculation,
        make_policy=make_policy,
    )


def make_request(
    request_id,
    prompt_len=4,
    outputs=(),
    priority=Priority.NORMAL,
    prompt=None,
    salt="",
    tenant="",
    time_left_s=None,
    cache_ttl_s=0,
    cache_prefix_tokens=0,
    cache_marks=(),
    **params,
):
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt or tuple(range(100, 100 + prompt_len)),
        output_token_ids=outputs,
        priority=priority,
        cache_salt=salt,
        tenant=tenant,
        time_left_s=time_left_s,
        cache_ttl_s=cache_ttl_s,
        cache_prefix_tokens=cache_prefix_tokens,
        cache_marks=cache_marks,
        sampling_params=SamplingParams(**{"seed": 1, "max_tokens": 8, **params}),
    )


def make_result(plan: StepPlan, token_id=7) -> StepResult:
    drawn = tuple((token_id,) * sequence.num_draws for sequence in plan.sequences)
    return StepResult(step_id=plan.step_id, token_ids=drawn)


def step(scheduler: Scheduler, token_id=7, now=0.0) -> tuple[StepPlan, list[TokenDelta]]:
    """One step in which every draw is `token_id`."""
    plan = scheduler.plan(now)
    deltas = scheduler.commit(plan, make_result(plan, token_id))
    scheduler.check_integrity()
    return plan, deltas


def run_to_end(scheduler: Scheduler) -> list[TokenDelta]:
    deltas = []
    while scheduler.has_work:
        deltas += step(scheduler)[1]
    return deltas


def shares(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Sequence id, first position and number of tokens of each sequence in a plan."""
    return [(s.sequence_id, s.first_position, len(s.token_ids)) for s in plan.sequences]


def members(plan: StepPlan) -> list[int]:
    return [sequence.sequence_id for sequence in plan.sequences]


def dropped(scheduler):
    """The requests that a scheduler has dropped since the last call."""
    return [one.attempt for one in scheduler.take_dropped()]

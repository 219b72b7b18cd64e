"""Several decode steps on one plan give the tokens that single steps give, on one rank and on two."""

import pytest

from holdfast.worker.config import SchedulerConfig
from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from tests.parity.harness import in_processes, load, on_ranks, worker_config

NUM_TOKENS = 40


def served(leader: LeaderRunner, prompts, max_steps: int, stop: int | None = None) -> tuple[dict[str, list[int]], int]:
    """The tokens of all prompts, one of which comes late, and the number of plans. Requests end at different times."""
    info = leader._runner.info
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=8),
        num_blocks=info.num_blocks,
        window=info.window,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
    )
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    num_plans = 0

    def add(number: int) -> None:
        params = SamplingParams(
            seed=0,
            temperature=0.0,
            max_tokens=NUM_TOKENS - 3 * number,
            ignore_eos=True,
            stop_token_ids=() if stop is None else (stop,),
        )
        request = EngineRequest(request_id=str(number), prompt_token_ids=tuple(prompts[number]), sampling_params=params)
        assert scheduler.add(request) is None

    for number in range(len(prompts) - 1):
        add(number)
    while scheduler.has_work:
        if num_plans == 4:
            add(len(prompts) - 1)
        plan = scheduler.plan(max_steps=max_steps)
        num_plans += 1
        for delta in scheduler.commit(plan, leader.run(plan)):
            tokens[delta.attempt] += delta.token_ids
        scheduler.check_integrity()
    return tokens, num_plans


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_tokens_are_those_of_single_steps(family, tiny_model, prompts):
    leader = load(worker_config(tiny_model(family), executor="native"))
    assert leader.runs_several_steps
    one, num_plans = served(leader, prompts, 1)
    several, num_fewer = served(leader, prompts, 8)
    assert several == one
    assert num_fewer < 0.6 * num_plans
    stop = one["0"][NUM_TOKENS // 2]
    assert served(leader, prompts, 8, stop)[0] == served(leader, prompts, 1, stop)[0]


def test_the_hf_backend_runs_one(tiny_model):
    assert not load(worker_config(tiny_model("llama"), executor="hf")).runs_several_steps


def test_ranks_that_share_no_memory_run_one(tiny_model, prompts):
    """Each knows the best token of its own part of the vocabulary alone."""
    config = worker_config(tiny_model("llama"), 2, executor="native")

    def work(leader: LeaderRunner) -> bool:
        served(leader, prompts, 1)
        return leader.runs_several_steps == leader._runner.backend.executor.shares_memory

    assert on_ranks(config, work)


@pytest.mark.slow
def test_ranks_in_processes_run_several_steps_together(tiny_model, prompts):
    config = worker_config(tiny_model("llama"), 2, executor="native")
    with in_processes(config) as leader:
        one, num_plans = served(leader, prompts, 1)
        several, num_fewer = served(leader, prompts, 8)
        assert leader.runs_several_steps
    assert several == one
    assert num_fewer < 0.6 * num_plans
    assert one == served(load(worker_config(tiny_model("llama"), executor="native")), prompts, 8)[0]

"""Sequences of one request on a real model: sharing and copying the prompt's blocks changes no token and no bit."""

from dataclasses import replace

import pytest

from holdfast.worker.config import SchedulerConfig
from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.request import EngineRequest, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from tests.parity.harness import load, logprobs_of, on_ranks, worker_config

NUM_SEQUENCES, NUM_NEW = 8, 12


@pytest.fixture(scope="module")
def leader(tiny_model, executor) -> LeaderRunner:
    return load(worker_config(tiny_model("llama"), executor=executor))


def served(
    leader: LeaderRunner, requests: list[EngineRequest], num_blocks: int | None = None, prefix_caching: bool = False
) -> tuple[dict[str, list[TokenLogprob]], Scheduler]:
    """The tokens of requests that run together, each with its logprobs, whose bits tell more than the tokens."""
    info = leader._runner.info
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=8),
        num_blocks=num_blocks or info.num_blocks,
        window=info.window,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        eos_token_ids=frozenset(),
        prefix_caching=prefix_caching,
    )
    return logprobs_of(scheduler, leader, requests), scheduler


def group_of(prompt: list[int]) -> list[EngineRequest]:
    params = SamplingParams(temperature=1.2, top_p=0.95, max_tokens=NUM_NEW, logprobs=3)
    return [
        EngineRequest(
            request_id=f"r{index}",
            prompt_token_ids=tuple(prompt),
            sampling_params=replace(params, seed=40 + index),
            group_id="r",
        )
        for index in range(NUM_SEQUENCES)
    ]


def alone(leader: LeaderRunner, requests: list[EngineRequest]) -> dict[str, list[TokenLogprob]]:
    return {request.request_id: served(leader, [request])[0][request.request_id] for request in requests}


@pytest.mark.parametrize("length", [68, 69, 70, 71])
def test_each_gets_the_bits_that_it_gets_alone(leader, prompts, length):
    requests = group_of((prompts[0] + prompts[1])[:length])
    together, scheduler = served(leader, requests)
    assert together == alone(leader, requests)
    stats = scheduler.stats()
    assert stats.num_forked_tokens == 7 * (length - 1)
    assert stats.num_tokens_computed == length + 7 + 8 * (NUM_NEW - 1)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_ones_too(leader, prompts, prefix_caching):
    requests = group_of(prompts[0][:27])
    num_blocks = 96 // leader._runner.info.block_size
    together, scheduler = served(leader, requests, num_blocks=num_blocks, prefix_caching=prefix_caching)
    assert scheduler.stats().num_preemptions > 0
    assert together == alone(leader, requests)


def test_every_rank_copies(tiny_model, prompts, executor):
    requests = group_of(prompts[2])
    config = worker_config(tiny_model("llama"), 2, executor=executor)
    together, separate = on_ranks(config, lambda leader: (served(leader, requests)[0], alone(leader, requests)))
    assert together == separate

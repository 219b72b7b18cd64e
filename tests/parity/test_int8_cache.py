"""Models with keys and values in int8 through the real loader, on both backends: near the plain ones, and bits that
depend on the request alone.
"""

from dataclasses import replace

import pytest
import torch

from holdfast.worker.config import SchedulerConfig
from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.executors.cpu.int8_proof import INT8_NUMERICS
from holdfast.worker.models.memory import MemoryEstimator
from holdfast.worker.scheduler.scheduler import Scheduler
from tests.parity.harness import (
    is_run_by,
    load,
    logits_in_chunks,
    logprobs_of,
    on_ranks,
    relative_difference,
    worker_config,
)
from tests.parity.test_forking import alone, group_of, served
from tests.worker.executors.cpu.native import same_bits


def config_of(folder, size=1, *, executor="auto"):
    config = worker_config(folder, size, executor=executor)
    return config.model_copy(update={"cache": config.cache.model_copy(update={"kv_cache_dtype": "int8"})})


@pytest.fixture(scope="module")
def leader(tiny_model, executor) -> LeaderRunner:
    leader = load(config_of(tiny_model("llama"), executor=executor))
    assert is_run_by(leader, executor)
    return leader


def test_it_is_loaded_so_and_has_numerics_of_its_own(leader, tiny_model, executor):
    info, plain = leader._runner.info, load(worker_config(tiny_model("llama"), executor=executor))._runner.info
    assert INT8_NUMERICS in info.executor
    assert INT8_NUMERICS not in plain.executor
    estimate = MemoryEstimator(config_of(tiny_model("llama"), executor=executor))
    assert estimate.kv_bytes_per_token == info.kv_bytes_per_token < plain.kv_bytes_per_token / 3  # of float32


def test_logits_are_near_those_of_hugging_face(leader, prompts, expected):
    difference = relative_difference(logits_in_chunks(leader, prompts, chunk=128), expected("llama"))
    assert 1e-5 < difference < 0.05, difference


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_logits_do_not_depend_on_chunks_and_company(leader, prompts, chunk):
    whole = logits_in_chunks(leader, prompts, chunk=128)
    for rows, expected in zip(logits_in_chunks(leader, prompts, chunk), whole, strict=True):
        assert same_bits(rows, expected)
    for prompt, expected in zip(prompts, whole, strict=True):
        assert same_bits(logits_in_chunks(leader, [prompt], chunk)[0], expected)


def test_ranks_have_the_bits_of_one(tiny_model, prompts, executor):
    """Of two ranks, each of which has one KV head: a row belongs to one of them."""
    leader = load(config_of(tiny_model("llama"), executor=executor))
    one = logits_in_chunks(leader, prompts, chunk=16)
    two = on_ranks(
        config_of(tiny_model("llama"), 2, executor=executor), lambda leader: logits_in_chunks(leader, prompts, chunk=7)
    )
    for rows, expected in zip(two, one, strict=True):
        if executor == "native":
            assert same_bits(rows, expected)
        else:  # its sums over ranks have roundings of their own, with any cache
            torch.testing.assert_close(rows, expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("length", [68, 71])
def test_sequences_of_one_request_share_and_copy_blocks(leader, prompts, length):
    requests = group_of((prompts[0] + prompts[1])[:length])
    together, scheduler = served(leader, requests)
    assert scheduler.stats().num_forked_tokens > 0
    assert together == alone(leader, requests)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_ones_have_the_same_bits(leader, prompts, prefix_caching):
    requests = group_of(prompts[0][:27])
    num_blocks = 96 // leader._runner.info.block_size
    together, scheduler = served(leader, requests, num_blocks=num_blocks, prefix_caching=prefix_caching)
    assert scheduler.stats().num_preemptions > 0
    assert together == alone(leader, requests)


def test_a_prefix_that_is_cached_has_the_same_bits(leader, prompts):
    """What comes later finds the blocks that the first one has left."""
    first, later = (replace(request, group_id="") for request in group_of(prompts[0])[:2])
    info = leader._runner.info
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=32),
        num_blocks=info.num_blocks,
        window=info.window,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        eos_token_ids=frozenset(),
        prefix_caching=True,
    )
    found = logprobs_of(scheduler, leader, [first]) | logprobs_of(scheduler, leader, [later])
    assert scheduler.stats().num_prefix_hit_tokens > 0
    assert found == alone(leader, [first, later])

"""Ranks with unequal shares of heads have the bits of one rank, and say what they need."""

import logging
from pathlib import Path

import pytest
import torch

from holdfast.worker.engine.model_runner import LeaderRunner, ModelRunner
from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.models.memory import MemoryEstimator
from tests.fake_group import run_ranks
from tests.parity.families import save_tiny_model
from tests.parity.harness import (
    greedy_tokens,
    hugging_face,
    load,
    logits_in_chunks,
    on_ranks,
    reference_logits,
    relative_difference,
    worker_config,
)

PROMPTS = [list(range(3, 3 + length)) for length in (1, 7, 40)]
HEADS = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "hidden_size": 144,
    "intermediate_size": 240,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"), **HEADS)


@pytest.fixture(scope="module")
def whole(folder) -> list[torch.Tensor]:
    return logits_in_chunks(load(worker_config(folder, executor="native", dtype="bfloat16")), PROMPTS, chunk=40)


def test_one_rank_is_hugging_face(folder):
    ours = logits_in_chunks(load(worker_config(folder, executor="native")), PROMPTS, chunk=40)
    assert relative_difference(ours, reference_logits(hugging_face(folder), PROMPTS)) <= 1e-5


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_bits_of_one(folder, whole, size):
    config = worker_config(folder, size, executor="native", dtype="bfloat16")
    split = on_ranks(config, lambda leader: logits_in_chunks(leader, PROMPTS, chunk=40))
    assert all(map(torch.equal, split, whole))


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "size"),
    [pytest.param("qwen2", 5, 5, 3, marks=pytest.mark.slow), ("qwen3", 7, 7, 2), ("gemma", 15, 5, 3)],
)
def test_other_numbers_of_heads(tmp_path, family, heads, kv_heads, size):
    sizes = {"hidden_size": heads * 8, "intermediate_size": heads * 32, "head_dim": 8}
    folder = save_tiny_model(family, tmp_path, num_attention_heads=heads, num_key_value_heads=kv_heads, **sizes)

    def computed(leader: LeaderRunner) -> tuple[list[list[int]], list[torch.Tensor]]:
        return greedy_tokens(leader, PROMPTS, num_new=8), logits_in_chunks(leader, PROMPTS, chunk=16)

    tokens, logits = computed(load(worker_config(folder, executor="native")))
    split_tokens, split_logits = on_ranks(worker_config(folder, size, executor="native"), computed)
    assert split_tokens == tokens
    assert all(map(torch.equal, split_logits, logits))


def test_each_rank_caches_its_own_heads(folder, caplog):
    config = worker_config(folder, 2, executor="native", dtype="bfloat16")
    with caplog.at_level(logging.WARNING):
        runners = run_ranks(2, lambda group: ModelRunner.load(config, group, device=torch.device("cpu")))
    per_head = 2 * (32 + 16) * 2  # two layers; keys are filled up to 32 dimensions
    assert [runner.info.kv_bytes_per_token for runner in runners] == [2 * per_head, per_head]
    assert len({runner.info.num_blocks for runner in runners}) == 1
    assert "9 query and 3 KV heads are shared unequally by 2 ranks (6, 3 query heads)" in caplog.text
    estimate = MemoryEstimator(config)
    assert estimate.kv_bytes_per_token == 2 * per_head
    assert estimate.shares == (2, 1)


def test_the_estimate_is_of_the_rank_with_most(folder):
    alone = MemoryEstimator(worker_config(folder, 1, executor="native")).weight_bytes
    of_two = MemoryEstimator(worker_config(folder, 2, executor="native")).weight_bytes
    table = 2 * 126 * 144 * 4  # embedding and head, which ranks share by rows of the vocabulary
    assert of_two == pytest.approx((alone - table) * 2 / 3 + table / 2, rel=0.02)


@pytest.mark.parametrize(
    ("executor", "size", "changes"),
    [("hf", 2, {}), ("native", 4, {}), ("native", 2, {"intermediate_size": 250})],
)
def test_what_cannot_be_shared_is_refused(folder, tmp_path, executor, size, changes):
    if changes:
        folder = save_tiny_model("llama", tmp_path, **{**HEADS, **changes})
    with pytest.raises(UnsupportedModelError, match=r"cannot be shared by|Choose another tensor_parallel_size"):
        on_ranks(worker_config(folder, size, executor=executor), lambda leader: None)

"""Models whose layers keep states compute what Hugging Face computes, however prompts are cut, packed and shared."""

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.worker.config import WorkerConfig
from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.models.memory import MemoryEstimator
from tests.parity.harness import (
    greedy_tokens,
    hugging_face,
    is_run_by,
    likeliest_tokens,
    load,
    logits_in_chunks,
    on_ranks,
    reference_logits,
    relative_difference,
    worker_config,
)
from tests.parity.hybrids import MAMBAS, PATTERNS, has_reference, save_config, save_hybrid

TOLERANCE = 1e-5
"""Of the largest logit."""


@pytest.fixture(scope="module", params=PATTERNS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def leader(folder) -> LeaderRunner:
    return load(worker_config(folder))


@pytest.fixture(scope="module")
def reference(folder) -> Any:
    model = hugging_face(folder)
    if not has_reference(model.config):
        pytest.skip("this version of transformers norms all groups of Mamba2 as one")
    return model


def test_whole_and_in_chunks_they_have_the_logits_of_hugging_face_and_the_same_bits(folder, leader, prompts, reference):
    assert is_run_by(leader, "native")
    assert leader._runner.info.row_invariant
    whole = logits_in_chunks(leader, prompts, 70)
    assert relative_difference(whole, reference_logits(reference, prompts)) <= TOLERANCE
    for chunk in (1, 7, 64):
        assert all(map(torch.equal, logits_in_chunks(leader, prompts, chunk), whole)), chunk


def test_they_go_on_with_the_tokens_of_hugging_face(leader, prompts, reference):
    tokens = greedy_tokens(leader, prompts, num_new=12)
    assert [likeliest_tokens(reference, *pair) for pair in zip(prompts, tokens, strict=True)] == tokens


def test_what_they_need_is_estimated_from_the_config(folder, leader):
    needs, info = MemoryEstimator(worker_config(folder)), leader._runner.info
    assert (needs.state_bytes, needs.kv_bytes_per_token) == (info.state_bytes, info.kv_bytes_per_token)
    assert needs.state_room(worker_config(folder), 1 << 20).num_slots(info.num_blocks) == info.num_state_slots


@pytest.mark.parametrize("pattern", MAMBAS)
def test_what_a_rank_of_them_needs_is_estimated(pattern, tmp_path):
    """But for what ranks share of groups, convolutions and tables, which is much of a tiny model."""
    folder = save_hybrid(tmp_path, pattern)
    whole, shared = (MemoryEstimator(worker_config(folder, size)) for size in (1, 2))
    assert 0.45 < shared.weight_bytes / whole.weight_bytes < 0.6
    assert shared.state_bytes == whole.state_bytes // 2


@pytest.mark.in_turn
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("pattern", ["attention last", "odd channels", "mixture", "conv, mixture", "kimi"])
def test_on_several_ranks_they_have_the_bits_of_one(pattern, size, tmp_path, prompts):
    folder = save_hybrid(tmp_path, pattern)
    alone = logits_in_chunks(load(worker_config(folder)), prompts, 7)
    shared = on_ranks(worker_config(folder, size), lambda leader: logits_in_chunks(leader, prompts, 7))
    assert all(map(torch.equal, shared, alone))


def test_the_hf_backend_does_not_serve_them(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"lfm2.*keep a state"):
        load(worker_config(save_hybrid(tmp_path, "attention last"), executor="hf"))


REAL = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288}
"""Of LFM2-1.2B."""


def real_config(folder: Path, size: int) -> WorkerConfig:
    """Two layers of real width, with weights that are made up."""
    sizes = {**REAL, "block_multiple_of": 256, "vocab_size": 512}
    save_config(folder, "attention last", **sizes, layer_types=["conv", "full_attention"], num_hidden_layers=2)
    return worker_config(folder, size, load_format="dummy", dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_ranks_of_a_real_width_have_the_bits_of_one_in_every_form(quantization, tmp_path, prompts):
    def logits(leader: LeaderRunner) -> list[torch.Tensor]:
        assert leader._runner.info.row_invariant
        assert leader._runner.info.state_bytes * leader._runner.info.tensor_parallel_size == 2048 * 3 * 4
        return logits_in_chunks(leader, prompts[1:], 7)

    def configured(size: int) -> WorkerConfig:
        config = real_config(tmp_path, size)
        return config.model_copy(update={"model": config.model.model_copy(update={"quantization": quantization})})

    alone = logits(load(configured(1)))
    assert all(map(torch.equal, on_ranks(configured(2), logits), alone))

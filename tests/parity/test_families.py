"""Every family that is served computes what Hugging Face computes, however its tokens are packed and cut."""

import pytest
import torch

from holdfast.worker.engine.model_runner import LeaderRunner
from tests.parity.families import SERVED, VARIANTS
from tests.parity.harness import (
    greedy_tokens,
    hugging_face,
    largest_difference,
    load,
    logits_in_chunks,
    worker_config,
)

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=[*SERVED, *VARIANTS])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def leader(family, tiny_model) -> LeaderRunner:
    return load(worker_config(tiny_model(family)))


def test_that_enough_families_are_served():
    assert len(SERVED) >= 36


def test_packed_sequences_have_the_logits_of_hugging_face(family, leader, prompts, expected):
    assert largest_difference(logits_in_chunks(leader, prompts, chunk=128), expected(family)) <= TOLERANCE


@pytest.mark.parametrize(("chunk", "length"), [(1, 18), (3, 70), (7, 70), (64, 70)])
def test_chunked_prompts_have_the_logits_of_hugging_face(family, leader, prompts, expected, chunk, length):
    ours = logits_in_chunks(leader, [prompt[:length] for prompt in prompts], chunk)
    assert largest_difference(ours, [rows[:length] for rows in expected(family)]) <= TOLERANCE


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gpt_oss", "llama", "mistral", "mixtral", "phi3", "qwen3"])
def test_greedy_tokens_are_those_of_generate(family, tiny_model, prompts):
    ours = greedy_tokens(load(worker_config(tiny_model(family))), prompts, num_new=32)
    model = hugging_face(tiny_model(family))
    model.generation_config.eos_token_id = None
    theirs = [
        model.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False, pad_token_id=0)[0, len(prompt) :]
        for prompt in prompts
    ]
    assert ours == [tokens.tolist() for tokens in theirs]

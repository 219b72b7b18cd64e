"""Every family that is served computes what Hugging Face computes, however its tokens are packed and cut.

All of it on what runs the family where the settings leave the choice; stated families on the HF backend as well,
some of them every time.
"""

import pytest

from holdfast.worker.engine.model_runner import LeaderRunner
from holdfast.worker.errors import UnsupportedModelError
from tests.parity.families import NATIVE_ALONE, NOT_NATIVE, SERVED, VARIANTS, executor_of
from tests.parity.harness import (
    greedy_tokens,
    hugging_face,
    is_run_by,
    likeliest_tokens,
    load,
    logits_in_chunks,
    relative_difference,
    worker_config,
)

TOLERANCE = 1e-5
"""Of the largest logit."""
ON_THE_HF_BACKEND = ("gpt_oss", "llama", "qwen3")
GENERATED = (
    *("deepseek_v2", "deepseek_v3", "gemma2", "gemma4_text, shared keys", "glm4_moe_lite", "gpt2", "gpt_oss", "llama"),
    *("mistral", "mixtral", "phi3", "qwen3"),
)
GENERATED_EVERY_TIME = ("deepseek_v3", "gemma4_text, shared keys", "gpt2", "gpt_oss", "llama")
WHOLE, CHUNKS, MORE_CHUNKS = (128, 70), ((7, 70), (1, 18)), ((3, 70), (64, 70))
"""Tokens of a sequence in a step, and of each prompt."""


@pytest.fixture(scope="module", params=[*SERVED, *VARIANTS])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def leader(family, tiny_model) -> LeaderRunner:
    leader = load(worker_config(tiny_model(family)))
    assert is_run_by(leader, executor_of(family))
    return leader


def test_that_enough_families_are_served():
    assert len(SERVED) >= 36


@pytest.mark.parametrize(
    "cuts", [(WHOLE, *CHUNKS), pytest.param(MORE_CHUNKS, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_packed_sequences_have_the_logits_of_hugging_face_whole_and_in_chunks(family, leader, prompts, expected, cuts):
    for chunk, length in cuts:
        ours = logits_in_chunks(leader, [prompt[:length] for prompt in prompts], chunk)
        assert relative_difference(ours, [rows[:length] for rows in expected(family)]) <= TOLERANCE, chunk


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in ON_THE_HF_BACKEND else pytest.mark.slow)
        for name in (*SERVED, *VARIANTS)
        if name not in {*NOT_NATIVE, *NATIVE_ALONE}
    ],
)
def test_on_the_hf_backend_stated_families_have_the_logits_of_hugging_face(family, tiny_model, prompts, expected):
    leader = load(worker_config(tiny_model(family), executor="hf"))
    assert is_run_by(leader, "hf")
    assert relative_difference(logits_in_chunks(leader, prompts, chunk=7), expected(family)) <= TOLERANCE


@pytest.mark.parametrize("family", NATIVE_ALONE)
def test_the_hf_backend_refuses_layers_that_share_keys_and_values(family, tiny_model):
    with pytest.raises(UnsupportedModelError, match="share the keys and values of others"):
        load(worker_config(tiny_model(family), executor="hf"))


@pytest.mark.parametrize("family", ["gpt2", "olmo"])
def test_a_family_that_must_be_a_decoder_program_and_cannot_be_is_refused(family, tiny_model):
    with pytest.raises(UnsupportedModelError, match=f"no native backend: .*{NOT_NATIVE[family]}"):
        load(worker_config(tiny_model(family), executor="native"))


GREEDY = [
    *(
        pytest.param(family, executor_of(family), marks=() if family in GENERATED_EVERY_TIME else pytest.mark.slow)
        for family in GENERATED
    ),
    ("gpt_oss", "hf"),
    pytest.param("llama", "hf", marks=pytest.mark.slow),  # every time in test_serving.py
]


@pytest.mark.parametrize(("family", "executor"), GREEDY)
def test_greedy_tokens_are_those_of_generate(family, executor, tiny_model, prompts):
    ours = greedy_tokens(load(worker_config(tiny_model(family), executor=executor)), prompts, num_new=32)
    model = hugging_face(tiny_model(family))
    for prompt, tokens in zip(prompts, ours, strict=True):
        assert len(tokens) == 32
        assert tokens == likeliest_tokens(model, prompt, tokens)

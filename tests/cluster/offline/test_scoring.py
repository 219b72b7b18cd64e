"""A real engine behind the HTTP API: prompts scored as lm-eval does it, equal to Hugging Face's, and JSON schemas."""

import json

import openai
import pytest
import torch

from holdfast import LLM
from tests.cluster.offline.doors import http_of

PROMPTS = [[72, 101, 108, 108, 111], [5, 200, 7, 7, 7, 90, 33, 64, 12, 3, 111], [9, 8]]


@pytest.fixture(scope="module")
def client(tiny_model):
    with (
        LLM(str(tiny_model), dtype="float32", num_threads=1, num_blocks=64) as llm,
        http_of(llm) as http,
        openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def reference(tiny_model):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager", dtype=torch.float32).eval()


def logprobs(model, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echoed_logprobs_are_those_of_hugging_face(client, reference, max_tokens):
    answer = client.completions.create(
        model="", prompt=PROMPTS, echo=True, logprobs=1, max_tokens=max_tokens, seed=1, temperature=0
    )
    for choice, prompt in zip(answer.choices, PROMPTS, strict=True):
        message, rows = choice.logprobs, logprobs(reference, prompt)
        assert len(message.token_logprobs) == len(message.tokens) == len(prompt) + max_tokens
        assert message.token_logprobs[0] is None
        scored = message.token_logprobs[1 : len(prompt)]
        expected = [float(rows[at, token_id]) for at, token_id in enumerate(prompt[1:])]
        assert scored == pytest.approx(expected, abs=2e-4)
        best = [max(top.values()) for top in message.top_logprobs[1 : len(prompt)]]  # what lm-eval calls greedy
        assert best == pytest.approx([float(rows[at].max()) for at in range(len(prompt) - 1)], abs=2e-4)
    assert answer.usage.prompt_tokens == sum(map(len, PROMPTS))


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_is_kept_by_a_model_that_knows_nothing(client, stream):
    properties = {"city": {"enum": ["Oslo", "Rome"]}, "degrees": {"type": "integer", "minimum": 0, "maximum": 9}}
    schema = {"type": "object", "properties": properties, "required": ["city", "degrees"]}
    shape = {
        "type": "json_schema",
        "json_schema": {"name": "weather", "schema": schema | {"additionalProperties": False}},
    }
    answer = client.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": "?"}],
        response_format=shape,
        max_tokens=120,
        seed=3,
        stream=stream,
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
    else:
        text = answer.choices[0].message.content
    said = json.loads(text)
    assert said.keys() == properties.keys()
    assert said["city"] in properties["city"]["enum"]
    assert said["degrees"] in range(10)

"""SmolLM2-135M-Instruct from its GGUF file: a real model, against Hugging Face, over ranks and under losses.

The file comes with a package of its own (docs/quantization.md); without it these tests are left out.
"""

from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from holdfast import LLM, SamplingParams
from holdfast.cluster.bundled_model.bundled_model import packaged_path
from holdfast.worker.errors import ConfigurationError
from tests.parity.harness import load, logits_in_chunks, worker_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 7 times 8?",
    "Name three colours.",
    "Who wrote Romeo and Juliet?",
    "Explain rain to a child.",
    "Translate 'good morning' to French.",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
)
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, logprobs=0)


@pytest.fixture(scope="module")
def file() -> Path:
    try:
        return packaged_path()
    except ConfigurationError as error:
        pytest.skip(str(error))


def tokens_of(outputs: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def bits_of(outputs: list[Any]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Tokens and their log-probabilities."""
    return [
        (
            tuple(one.token_ids),
            tuple(table[token].logprob for token, table in zip(one.token_ids, one.logprobs, strict=True)),
        )
        for one in (output.outputs[0] for output in outputs)
    ]


@pytest.fixture(scope="module")
def alone(file) -> Iterator[Any]:
    with LLM("smollm2", max_model_len=1024) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(alone) -> list[Any]:
    return bits_of(alone.chat(CHATS, GREEDY))


def test_it_is_hugging_face_in_float32(file):
    """The same file read by transformers' own reader, tokenizer and modules."""
    from transformers import AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM, LlamaRotaryEmbedding

    with LLM("smollm2", max_model_len=1024, dtype="float32") as llm:
        outputs = llm.chat(CHATS, GREEDY)
    with torch.device("meta"):
        names = LlamaForCausalLM(LlamaConfig(num_hidden_layers=30))
    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=names)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**read["config"])).eval()
    missing = model.load_state_dict(read["tensors"], strict=False, assign=True)
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    assert not missing.unexpected_keys
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
    assert model.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for chat, output in zip(CHATS, outputs, strict=True):
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert list(prompt) == list(output.prompt_token_ids)
        with torch.inference_mode():
            found = model.generate(
                torch.tensor([prompt]), max_new_tokens=48, do_sample=False, eos_token_id=2, pad_token_id=2
            )[0, len(prompt) :].tolist()
        assert found == list(output.outputs[0].token_ids), chat


def test_each_answer_is_its_own_whatever_is_beside_it(alone, answers):
    assert [bits_of(alone.chat([chat], GREEDY))[0] for chat in CHATS[:3]] == answers[:3]
    assert bits_of(alone.chat([*reversed(CHATS)], GREEDY)) == answers[::-1]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_bits_of_one(file, answers, size):
    with LLM("smollm2", max_model_len=1024, tensor_parallel_size=size) as llm:
        assert bits_of(llm.chat(CHATS, GREEDY)) == answers


def test_keys_and_values_in_int8_hardly_change_what_it_says(file):
    """Over 1,000 tokens of Python's documentation, against keys and values in bfloat16: the mean divergence in nats,
    how often the best token is the same, and what the text is worth to each (nats a token).
    """
    from transformers import AutoTokenizer

    text = "\n".join(topics[name] for name in ("assignment", "exceptions", "objects"))
    ids = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)(text)["input_ids"][:1000]
    found = []
    for dtype in ("bfloat16", "int8"):
        config = worker_config(file, max_model_len=1024)
        cache = config.cache.model_copy(update={"kv_cache_dtype": dtype})
        model = config.model.model_copy(update={"quantized_activations": "bfloat16"})
        leader = load(config.model_copy(update={"cache": cache, "model": model}))
        found.append(logits_in_chunks(leader, [ids], 250)[0].double().log_softmax(-1))
        leader.close()
    plain, small = found
    divergence = float((plain.exp() * (plain - small)).sum(-1).mean())
    same = float((plain.argmax(-1) == small.argmax(-1)).double().mean())
    losses = [float(-one[range(len(ids) - 1), ids[1:]].mean()) for one in found]
    print(f"divergence {divergence:.2e} nats, the same best token {same:.1%}, losses {losses}")
    assert 0 < divergence < 2e-3
    assert same > 0.97
    assert abs(losses[1] - losses[0]) < 1e-2


def test_it_answers(file):
    with LLM("smollm2", max_model_len=1024) as llm:
        (output,) = llm.chat(CHATS[:1], SamplingParams(temperature=0.0, max_tokens=20))
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"

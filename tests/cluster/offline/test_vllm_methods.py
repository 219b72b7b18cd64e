"""Methods and engines of vLLM that scripts use: they work, or refuse by name."""

import argparse
import asyncio
import inspect

import pytest

from holdfast.cluster.offline import vllm_engines
from holdfast.cluster.offline.llm import LLM
from holdfast.cluster.offline.outputs import BeamSearchParams
from holdfast.cluster.offline.vllm_engines import AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine
from holdfast.cluster.offline.vllm_methods import Refused
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.value_types import RequestOutputKind

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPT = list(range(1, 40))
KINDS = list(RequestOutputKind)


def args_of(model: object, kind: type[EngineArgs] = EngineArgs) -> EngineArgs:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--temperature", type=float)
    flags = f"--model {model} --dtype float32 --max-model-len 128 --no-enforce-eager -tp 1 --num-gpu-blocks-override 64"
    return kind.from_cli_args(parser.parse_args(flags.split()))


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM.from_engine_args(args_of(tiny_model)) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm):
    return llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)[0]


def test_arguments_of_a_command_line(tiny_model, llm):
    assert args_of(tiny_model).arguments() == {
        "model": str(tiny_model),
        "dtype": "float32",
        "max_model_len": 128,
        "enforce_eager": False,
        "num_gpu_blocks_override": 64,
    }
    assert EngineArgs().arguments() == {}
    assert llm.engine.info.max_model_len == 128
    assert llm.engine.info.num_blocks == 64
    assert llm.get_world_size() == 1


def test_what_is_enqueued_runs_together(llm, expected):
    ids = llm.enqueue([{"prompt_token_ids": PROMPT}], GREEDY) + llm.enqueue([{"prompt_token_ids": PROMPT}], GREEDY)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert len(set(ids)) == 2
    assert all(output.outputs == expected.outputs for output in outputs)
    assert llm.wait_for_completion() == []


def test_a_reset_cache_has_no_prefixes_of_before(llm, expected):
    def num_cached() -> int:
        return llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)[0].num_cached_tokens

    num_cached()
    assert num_cached() > 0
    assert llm.reset_prefix_cache() is True
    assert num_cached() == 0
    assert num_cached() > 0


REFUSED = sorted(name for name in vars(Refused) if not name.startswith("_"))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(llm, name):
    for arguments, named in (((), {}), ((print,), {"timeout": 1})):
        with pytest.raises(InvalidRequestError, match=f"^{name} = "):
            getattr(llm, name)(*arguments, **named)


def test_enqueued_chats_give_what_chats_give(llm):
    chat, enqueued = inspect.signature(LLM.chat), inspect.signature(LLM.enqueue_chat)
    assert (chat.parameters, LLM.enqueue_chat.__name__) == (enqueued.parameters, "enqueue_chat")
    assert list(chat.parameters)[:5] == ["self", "messages", "sampling_params", "use_tqdm", "lora_request"]
    chats = [[{"role": "user", "content": text}] for text in ("hello", "say hi")]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    told = llm.chat(chats, GREEDY, chat_template=template, use_tqdm=False, mm_processor_kwargs=None)
    assert [output.prompt for output in told] == ["hello", "say hi"]
    ids = llm.enqueue_chat(chats, GREEDY, chat_template=template, tokenization_kwargs=None)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [(one.prompt, one.outputs) for one in outputs] == [(one.prompt, one.outputs) for one in told]
    with pytest.raises(InvalidRequestError, match=r"^lora_request = "):
        llm.enqueue_chat(chats, GREEDY, lora_request="x")
    with pytest.raises(InvalidRequestError, match=r"^chat_template_content_format = "):
        llm.enqueue_chat(chats, GREEDY, chat_template_content_format="openai")


def test_a_prompt_of_token_ids_shows_the_text_that_came_with_it(llm):
    (output,) = llm.generate({"prompt_token_ids": PROMPT, "prompt": "shown"}, GREEDY, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == ("shown", PROMPT)


def test_a_beam_search_takes_vllms_defaults():
    BeamSearchParams(beam_width=2, max_tokens=3, structured_outputs=None, skip_special_tokens=True, watermarking=None)
    with pytest.raises(InvalidRequestError, match=r"^allowed_token_ids = "):
        BeamSearchParams(beam_width=2, max_tokens=3, allowed_token_ids=[1])


def test_outputs_have_the_attributes_of_vllm(expected):
    names = ("lora_request", "encoder_prompt", "encoder_prompt_token_ids", "kv_transfer_params")
    assert [getattr(expected, name) for name in names] == [None] * len(names)
    assert expected.outputs[0].lora_request is expected.outputs[0].routed_experts is None


def joined(outputs: list, kind: RequestOutputKind) -> list[int]:
    if kind is RequestOutputKind.DELTA:
        return [token for output in outputs for token in output.outputs[0].token_ids]
    assert kind is not RequestOutputKind.FINAL_ONLY or len(outputs) == 1
    return outputs[-1].outputs[0].token_ids


def test_engines_give_the_kind_of_output_that_was_asked_for(tiny_model, expected):
    async def stream(engine: AsyncLLMEngine, kind: RequestOutputKind) -> list:
        params = SamplingParams(temperature=0, max_tokens=6, output_kind=kind)
        return [output async for output in engine.generate({"prompt_token_ids": PROMPT}, params, f"a-{kind}")]

    engine = AsyncLLMEngine.from_engine_args(
        args_of(tiny_model, AsyncEngineArgs), usage_context="api", stat_loggers=None
    )
    for kind in KINDS:
        assert joined(asyncio.run(stream(engine, kind)), kind) == expected.outputs[0].token_ids
    assert (engine.is_running, engine.errored, engine.is_stopped) == (True, False, False)
    engine.shutdown()
    assert (engine.is_running, engine.errored, engine.is_stopped) == (False, True, True)


def test_an_engine_takes_vllms_arguments_that_ask_for_nothing(tiny_model):
    async def first(**more: object) -> object:
        return await anext(engine.generate({"prompt_token_ids": PROMPT}, GREEDY, "a", **more))

    engine = AsyncLLMEngine.from_engine_args(args_of(tiny_model, AsyncEngineArgs))
    asyncio.run(first(lora_request=None, trace_headers=None, tokenization_kwargs={}))
    with pytest.raises(InvalidRequestError, match=r"^trace_headers = "):
        asyncio.run(first(trace_headers={"a": "b"}))
    with pytest.raises(TypeError, match="'nonsense'"):
        asyncio.run(first(nonsense=None))
    with pytest.raises(InvalidRequestError, match=r"^encode = "):
        engine.encode("a")
    engine.shutdown()


def test_an_engine_is_stepped_to_its_end(tiny_model, expected):
    engine = LLMEngine.from_engine_args(args_of(tiny_model))
    for kind in KINDS:
        params = SamplingParams(temperature=0, max_tokens=6, output_kind=kind)
        engine.add_request(kind.name, {"prompt_token_ids": PROMPT}, params)
    outputs: dict[str, list] = {kind.name: [] for kind in KINDS}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(output)
    for kind in KINDS:
        assert joined(outputs[kind.name], kind) == expected.outputs[0].token_ids
    engine.shutdown()


def test_an_engine_answers_what_scripts_ask_of_it(tiny_model, expected):
    engine = LLMEngine.from_engine_args(args_of(tiny_model))
    engine.add_request("one", {"prompt_token_ids": PROMPT}, GREEDY)
    outputs = [output for _ in iter(engine.has_unfinished_requests, False) for output in engine.step()]
    assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids
    assert engine.reset_prefix_cache() is True
    assert engine.is_sleeping() is False
    assert {metric.name for metric in engine.get_metrics()} >= {"vllm:generation_tokens"}
    assert engine.tokenizer.encode("hello") == engine.get_tokenizer().encode("hello")
    for name in REFUSED:
        with pytest.raises(InvalidRequestError, match=f"^{name} = "):
            getattr(engine, name)()
    engine.shutdown()


def test_an_engine_of_coroutines_waits_until_nothing_runs(tiny_model, monkeypatch):
    async def drained(engine: AsyncLLMEngine) -> int:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        stream = engine.generate({"prompt_token_ids": PROMPT}, params, "runs")
        await anext(stream)
        with monkeypatch.context() as patch:
            patch.setattr(vllm_engines, "_num_unfinished", lambda llm: 1)
            with pytest.raises(TimeoutError):
                await engine.wait_for_requests_to_drain(0)
        reading = asyncio.ensure_future(_num_read(stream))
        await engine.wait_for_requests_to_drain()
        assert engine.get_num_unfinished_requests() == 0
        assert (await engine.is_sleeping(), await engine.is_paused()) == (False, False)
        return await reading

    engine = AsyncLLMEngine.from_engine_args(args_of(tiny_model, AsyncEngineArgs))
    assert asyncio.run(drained(engine)) > 0
    engine.shutdown()


async def _num_read(stream) -> int:
    return len([output async for output in stream])

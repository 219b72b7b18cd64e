"""Methods and engines of vLLM that scripts use: they work, or refuse by name."""

import argparse
import asyncio

import pytest

from holdfast.cluster.offline.engine_args import AsyncEngineArgs, EngineArgs
from holdfast.cluster.offline.llm import LLM
from holdfast.cluster.offline.vllm_engines import AsyncLLMEngine, LLMEngine
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import RequestOutputKind, SamplingParams

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


@pytest.mark.parametrize("name", ["sleep", "wake_up", "release_kv_cache_memory", "start_profile", "stop_profile"])
def test_what_is_not_supported_is_refused_by_name(llm, name):
    with pytest.raises(InvalidRequestError, match=f"^{name} = "):
        getattr(llm, name)()


@pytest.mark.parametrize("name", ["collective_rpc", "apply_model"])
def test_code_of_callers_is_refused_by_name(llm, name):
    with pytest.raises(InvalidRequestError, match=f"^{name} = "):
        getattr(llm, name)(print)


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

    engine = AsyncLLMEngine.from_engine_args(args_of(tiny_model, AsyncEngineArgs))
    for kind in KINDS:
        assert joined(asyncio.run(stream(engine, kind)), kind) == expected.outputs[0].token_ids
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

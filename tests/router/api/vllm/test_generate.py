"""vLLM's engine protocol over fake replicas, with the stock stubs that its gateways use."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from holdfast.foreign import vllm_engine_pb2 as ours
from holdfast.router.api.grpc import server
from holdfast.router.api.vllm.generate import GenerateResponses
from holdfast.router.api.vllm.servicer import SERVICE, LoadReport, VllmEngineServicer, model_info
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.generation import OutputDelta, Usage
from holdfast.worker.errors import ReplicaError
from holdfast.worker.request import EngineLoad, FinishReason, TokenLogprob
from tests.fakes import FakeReplica, fake_tokens
from tests.loops import on_each_loop
from tests.router.core import facts
from tests.router.site import Site, refusal, site

HELLO = [104, 105]


class IdleEngine:
    """Stands for the engine that the figures come from."""

    load = EngineLoad(num_running=3, num_waiting=1, num_waiting_tokens=50, num_free_blocks=6, num_total_blocks=8)
    failure: ReplicaError | None = None


@asynccontextmanager
async def api(
    *replicas: FakeReplica, engine: object = None
) -> AsyncIterator[tuple[Site, vllm_engine_pb2_grpc.VllmEngineStub]]:
    async with site(*replicas) as place:
        processor = place.router._request_processor
        servicer = VllmEngineServicer(processor, engine or IdleEngine(), facts(block_size=16), max_num_seqs=4)
        served = server.build_server({SERVICE: servicer}, RouterConfig(), LimitsConfig())
        port = served.add_insecure_port("127.0.0.1:0")
        await served.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield place, vllm_engine_pb2_grpc.VllmEngineStub(channel)
        await served.stop(None)


def ask(*, stream: bool = True, max_tokens: int = 8, **fields: object) -> pb.GenerateRequest:
    params = fields.pop("sampling_params", None) or pb.SamplingParams(max_tokens=max_tokens, seed=1)
    given = {"tokenized": pb.TokenizedInput(input_ids=HELLO)} if not {"text", "tokenized"} & fields.keys() else {}
    return pb.GenerateRequest(**({"request_id": "r1", "sampling_params": params, "stream": stream} | given | fields))


async def told(call) -> tuple[list[pb.GenerateStreamChunk], list[pb.GenerateComplete]]:
    answers = [answer async for answer in call]
    chunks = [answer.chunk for answer in answers if answer.HasField("chunk")]
    return chunks, [answer.complete for answer in answers if answer.HasField("complete")]


def test_every_field_and_method_that_is_ours_is_numbered_as_in_the_stock_protocol():
    for name, message in ours.DESCRIPTOR.message_types_by_name.items():
        stock = pb.DESCRIPTOR.message_types_by_name[name]
        for field in message.fields:
            other = stock.fields_by_name[field.name]
            mine = (field.number, field.type, field.is_repeated, field.has_presence)
            assert mine == (other.number, other.type, other.is_repeated, other.has_presence), f"{name}.{field.name}"
            holder = field.containing_oneof and field.containing_oneof.name
            assert holder == (other.containing_oneof and other.containing_oneof.name), f"{name}.{field.name}"
    for method in ours.DESCRIPTOR.services_by_name["VllmEngine"].methods:
        stock = pb.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name[method.name]
        assert (stock.input_type.name, stock.output_type.name) == (method.input_type.name, method.output_type.name)
        assert (stock.client_streaming, stock.server_streaming) == (method.client_streaming, method.server_streaming)


@on_each_loop
async def test_a_stream_has_the_new_tokens_of_each_step_and_then_an_end():
    async with api(await FakeReplica.start()) as (_, stub):
        chunks, (end,) = await told(stub.Generate(ask()))
    tokens = fake_tokens(HELLO, 1, 8)
    assert [token for chunk in chunks for token in chunk.token_ids] == tokens
    assert all(chunk.completion_tokens == len(chunk.token_ids) for chunk in chunks)
    assert {chunk.prompt_tokens for chunk in chunks} == {2}
    assert (end.finish_reason, list(end.output_ids)) == ("length", list(chunks[-1].token_ids))
    assert end.WhichOneof("matched_stop") is None


@on_each_loop
async def test_without_a_stream_there_is_one_answer_for_each_completion():
    params = pb.SamplingParams(max_tokens=5, seed=1, n=3, temperature=0.5)
    async with api(await FakeReplica.start()) as (_, stub):
        chunks, ends = await told(stub.Generate(ask(stream=False, sampling_params=params)))
    assert chunks == []
    assert {end.index: list(end.output_ids) for end in ends} == {
        index: fake_tokens(HELLO, 1 + index, 5) for index in range(3)
    }
    assert {end.completion_tokens for end in ends} == {5}


@on_each_loop
async def test_text_is_tokenized_and_a_stop_string_ends_the_output_and_is_named():
    async with api(await FakeReplica.start()) as (_, stub):
        _, (whole,) = await told(stub.Generate(ask(stream=False, text="hi")))
        text = bytes(whole.output_ids).decode()
        params = pb.SamplingParams(max_tokens=8, seed=1, stop=["zzz", text[3:5]])
        _, (stopped,) = await told(stub.Generate(ask(stream=False, text="hi", sampling_params=params)))
        stop_ids = pb.SamplingParams(max_tokens=8, seed=1, stop_token_ids=[whole.output_ids[2]])
        _, (by_token,) = await told(stub.Generate(ask(text="hi", sampling_params=stop_ids)))
    assert list(whole.output_ids) == fake_tokens(b"hi", 1, 8)
    assert (stopped.finish_reason, stopped.matched_stop_str) == ("stop", text[3:5])
    assert list(stopped.output_ids) == list(whole.output_ids)[: text.index(text[3:5]) + 2]
    assert (by_token.finish_reason, by_token.matched_token_id) == ("stop", whole.output_ids[2])


@on_each_loop
async def test_an_abort_ends_a_request_after_what_it_has_and_unknown_ids_are_passed_over():
    replica = await FakeReplica.start()
    async with api(replica) as (place, stub):
        call = stub.Generate(ask(max_tokens=50_000))
        await anext(aiter(call))
        await stub.Abort(pb.AbortRequest(request_ids=["nobody", "r1", ""]))
        _, (end,) = await told(call)
        assert end.finish_reason == "abort"
        await place.until_idle()


@on_each_loop
async def test_a_cancelled_call_leaves_the_replica():
    replica = await FakeReplica.start()
    async with api(replica) as (place, stub):
        call = stub.Generate(ask(max_tokens=50_000))
        await anext(aiter(call))
        call.cancel()
        await place.until_idle()


@on_each_loop
async def test_a_stream_outlives_the_replica_it_runs_on():
    one, other = await FakeReplica.start("one"), await FakeReplica.start("other")
    async with api(one, other) as (place, stub):
        call = stub.Generate(ask(max_tokens=400))
        first = (await anext(aiter(call))).chunk
        runs = one if one.running else other
        await runs.kill()
        place.replicas.remove(runs)
        chunks, (end,) = await told(call)
    tokens = [token for chunk in (first, *chunks) for token in chunk.token_ids]
    assert tokens == fake_tokens(HELLO, 1, 400)
    assert end.finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({"mm_inputs": pb.MultimodalInputs(mm_hashes=["x"])}, "mm_inputs"),
        ({"extra_mm_inputs": [pb.MultimodalInputs()]}, "extra_mm_inputs"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"tokenized": pb.TokenizedInput()}, "token_ids"),
        ({"sampling_params": pb.SamplingParams(structural_tag="{}")}, "sampling_params.structural_tag"),
        ({"sampling_params": pb.SamplingParams(temperature=-1)}, "sampling_params.temperature"),
        ({"sampling_params": pb.SamplingParams(logprobs=-1)}, "sampling_params.logprobs"),
    ],
)
@on_each_loop
async def test_what_cannot_be_done_is_refused_by_name(fields, field):
    async with api(await FakeReplica.start()) as (_, stub):
        answer = await refusal(told(stub.Generate(ask(**fields))))
        assert (answer.code, answer.field) == ("INVALID_ARGUMENT", field)


@on_each_loop
async def test_a_request_without_a_prompt_is_refused():
    async with api(await FakeReplica.start()) as (_, stub):
        answer = await refusal(told(stub.Generate(pb.GenerateRequest(request_id="x"))))
        assert (answer.code, answer.field) == ("INVALID_ARGUMENT", "input")


@on_each_loop
async def test_health_is_that_of_the_engine():
    engine = IdleEngine()
    async with api(await FakeReplica.start(), engine=engine) as (_, stub):
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        engine.failure = ReplicaError("a rank died")
        sick = await stub.HealthCheck(pb.HealthCheckRequest())
        assert (sick.healthy, sick.message) == (False, "a rank died")


@on_each_loop
async def test_the_engine_tells_of_itself():
    async with api(await FakeReplica.start()) as (_, stub):
        info = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.server_type, info.active_requests, info.block_size, info.max_num_seqs) == ("vllm-grpc", 4, 16, 4)
    assert info.data_parallel_size == 1


def test_a_models_info_has_what_its_folder_says(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "bos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": None, "do_sample": True}))
    info = model_info(facts(path=str(tmp_path), eos_token_ids=frozenset({3, 1})))
    assert list(info.architectures) == ["LlamaForCausalLM"]
    assert (info.bos_token_id, list(info.eos_token_ids)) == (7, [1, 3])
    assert json.loads(info.default_sampling_params_json) == {"temperature": 0.6}
    assert (info.served_model_name, info.max_context_length, info.vocab_size) == ("m", 1000, 100)


def test_loads_have_a_rate_of_what_was_generated_lately(monkeypatch: pytest.MonkeyPatch):
    now = [10.0]
    report = LoadReport(facts(block_size=16), 4, clock=lambda: now[0])

    class Stats:
        num_tokens_generated = 100
        prefix_hit_rate = 0.25

    first = report.of(IdleEngine.load, Stats)
    assert (first.num_running_reqs, first.num_waiting_reqs, first.num_total_reqs) == (3, 1, 4)
    assert (first.num_used_tokens, first.max_total_num_tokens, first.token_usage) == (32, 128, 0.25)
    assert (first.utilization, first.cache_hit_rate, first.num_waiting_uncached_tokens) == (0.75, 0.25, 50)
    assert first.gen_throughput == 0
    for now[0], Stats.num_tokens_generated in ((11.0, 150), (14.0, 150), (17.0, 450)):
        rate = report.of(IdleEngine.load, Stats).gen_throughput
    assert rate == 100.0


def output_delta(*token_ids: int, text: str = "", finish: FinishReason | None = None, **fields: object) -> OutputDelta:
    usage = Usage(num_prompt_tokens=2, num_completion_tokens=1) if finish else None
    return OutputDelta("r", 0, token_ids, text, finish, usage, **fields)


@pytest.mark.parametrize(
    ("reason", "matched"), [(5, {"matched_token_id": 5}), ("END", {"matched_stop_str": "END"}), (None, {})]
)
def test_what_ended_a_completion_is_named(reason, matched):
    responses = GenerateResponses(HELLO, stream=False)
    (end,) = responses.of(output_delta(5, text="so", finish=FinishReason.STOP, stop_reason=reason))
    kind = end.complete.WhichOneof("matched_stop")
    assert ({kind: getattr(end.complete, kind)} if kind else {}) == matched


def test_logprobs_have_a_place_for_each_token_and_none_for_the_first_of_a_prompt():
    known = TokenLogprob(token_id=7, logprob=-0.5, rank=2, top=((8, -0.25), (7, -0.5)))
    responses = GenerateResponses(HELLO, stream=True)
    (chunk,) = responses.of(output_delta(7, logprobs=(known,), prompt_logprobs=(None, known)))
    output, prompt = chunk.chunk.output_logprobs, chunk.chunk.input_logprobs
    assert (list(output.token_ids), list(output.token_logprobs)) == ([7], [-0.5])
    assert list(output.top_logprobs[0].token_ids) == [8, 7]
    assert [item.HasField("value") for item in prompt.token_logprobs] == [False, True]
    assert list(prompt.token_ids) == HELLO
    assert [len(top.values) for top in prompt.top_logprobs] == [0, 2]

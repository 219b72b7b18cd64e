"""vLLM's engine protocol on a real replica, asked by the stubs that its gateways use."""

import asyncio
import socket
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.cluster.offline.llm import LLM
from holdfast.cluster.serve.engine_api import ApiSettings, EngineApi
from holdfast.cluster.serve.security import ClusterSecurity
from holdfast.foreign import health_pb2, health_pb2_grpc
from holdfast.router.config import SecurityConfig
from holdfast.router.security.api_keys import KeyRing, write_keys
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.config import ParallelConfig, WorkerConfig
from holdfast.worker.replica.replica import Replica
from holdfast.worker.sampling_params import SamplingParams
from tests.loops import on_a_loop
from tests.router.security.test_gate import key_of, secret_of
from tests.router.site import eventually, refusal, with_key

PROMPT = "The capital of France is"
CONFIG = located(WorkerConfig(parallel=ParallelConfig(num_threads=1)))


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    replica = Replica.start(CONFIG)
    yield replica
    replica.stop()


@pytest.fixture(scope="module")
def expected() -> Iterator[list[int]]:
    """What one process answers greedily."""
    with LLM("demo", num_threads=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        yield llm.generate(PROMPT, params)[0].outputs[0].token_ids


def greedy(max_tokens: int = 24, **fields: object) -> pb.SamplingParams:
    return pb.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


async def started(replica: Replica, **settings: object) -> EngineApi:
    return await EngineApi.start(replica, ApiSettings(**settings), CONFIG.scheduler)


@on_a_loop
async def test_a_gateway_drives_the_engine_and_gets_the_tokens_of_every_other_api(replica, expected):
    api = await started(replica)
    async with grpc.aio.insecure_channel(api.address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        tokenizer = Tokenizer.load(info.tokenizer_path)
        ids = pb.TokenizedInput(original_text=PROMPT, input_ids=tokenizer.encode(PROMPT))
        calls = [
            stub.Generate(
                pb.GenerateRequest(request_id=f"r{number}", tokenized=ids, sampling_params=greedy(), stream=True)
            )
            for number in range(4)
        ]
        for answers in await asyncio.gather(*(collected(call) for call in calls)):
            assert [token for answer in answers for token in answer.chunk.token_ids] == expected
            assert answers[-1].complete.finish_reason == "length"
        loads = await stub.GetLoads(pb.GetLoadsRequest())
        assert (loads.dp_rank_count, loads.loads[0].num_total_reqs) == (1, 0)
        assert loads.loads[0].max_total_num_tokens > 0
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
    await api.stop()
    assert info.served_model_name == "demo"
    assert list(info.architectures)
    assert list(info.eos_token_ids)


@on_a_loop
async def test_where_keys_are_asked_for_a_gateway_needs_one_or_the_clusters_token(replica, tmp_path):
    write_keys(tmp_path / "keys.json", KeyRing([key_of("gateway")]))
    settings = SecurityConfig(api_keys=tmp_path / "keys.json")
    security = ClusterSecurity(token="token-of-the-cluster", settings=settings)
    api = await EngineApi.start(replica, ApiSettings(), CONFIG.scheduler, security)
    async with grpc.aio.insecure_channel(api.address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        for wrong in ("", secret_of("gateway") + "x", "another-token"):
            for call in (
                collected(stub.Generate(pb.GenerateRequest(text=PROMPT), metadata=with_key(wrong))),
                stub.Abort(pb.AbortRequest(), metadata=with_key(wrong)),
                stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=with_key(wrong)),
                stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=with_key(wrong)),
                stub.GetLoads(pb.GetLoadsRequest(), metadata=with_key(wrong)),
            ):
                assert (await refusal(call)).code == "UNAUTHENTICATED"
        for right in (secret_of("gateway"), "token-of-the-cluster"):
            asked = pb.GenerateRequest(text=PROMPT, sampling_params=greedy(2))
            assert await collected(stub.Generate(asked, metadata=with_key(right)))
    await api.stop()


@on_a_loop
async def test_structure_and_logprobs_are_the_engines(replica):
    api = await started(replica)
    async with grpc.aio.insecure_channel(api.address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        chosen = pb.SamplingParams(choice=pb.ChoiceConstraint(choices=["red", "green"]), max_tokens=8, logprobs=1)
        (answer,) = await collected(stub.Generate(pb.GenerateRequest(text=PROMPT, sampling_params=chosen)))
        output = list(answer.complete.output_ids)
        text = Tokenizer.load(CONFIG.model.model).decode(output, skip_special_tokens=True)
        assert text in ("red", "green")
        assert list(answer.complete.output_logprobs.token_ids) == output
    await api.stop()


@on_a_loop
async def test_an_engine_that_winds_down_is_not_healthy_and_refuses_but_ends_what_runs(replica, expected):
    api = await started(replica)
    async with grpc.aio.insecure_channel(api.address) as channel:
        stub, health = vllm_engine_pb2_grpc.VllmEngineStub(channel), health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine")
        assert MessageToDict(await health.Check(asked)) == {"status": "SERVING"}
        call = stub.Generate(pb.GenerateRequest(text=PROMPT, sampling_params=greedy(), stream=True))
        first = await anext(aiter(call))
        api.wind_down()
        assert MessageToDict(await health.Check(asked)) == {"status": "NOT_SERVING"}
        assert not (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        refused = await refusal(collected(stub.Generate(pb.GenerateRequest(text=PROMPT))))
        assert refused.code == "UNAVAILABLE"
        answers = [first, *await collected(call)]
        assert [token for answer in answers for token in answer.chunk.token_ids] == expected
    await api.stop()


@on_a_loop
async def test_the_next_port_is_taken_where_one_is_not_free(replica):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        api = await started(replica, port=port)
        assert port < int(api.address.rpartition(":")[2]) < port + 64
        await api.stop()


@on_a_loop
async def test_requests_of_a_api_that_stops_leave_the_engine(replica):
    api = await started(replica)
    async with grpc.aio.insecure_channel(api.address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        call = stub.Generate(pb.GenerateRequest(text=PROMPT, sampling_params=greedy(400), stream=True))
        await anext(aiter(call))
        await api.stop()

    async def is_idle() -> bool:
        return replica.engine.load.num_running == 0

    await eventually(is_idle)


async def collected(call) -> list[pb.GenerateResponse]:
    return [answer async for answer in call]

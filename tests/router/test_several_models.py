"""Several models behind one router, added and taken away while it runs, through every API."""

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx2
import pytest
from google.protobuf.json_format import MessageToDict

from holdfast.foreign import grpc_service_pb2, grpc_service_pb2_grpc, health_pb2, health_pb2_grpc
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.v1 import inference_pb2
from tests.fakes import ByteCodec, FakeReplica, byte_tokenizer
from tests.loops import on_a_loop, on_each_loop
from tests.router.api.open_inference.messages import infer
from tests.router.site import Site, collected, eventually, expected, refusal, request, site


async def two_models() -> tuple[FakeReplica, FakeReplica]:
    return await FakeReplica.start("r-a", "model-a"), await FakeReplica.start("r-b", "model-b")


async def names(place: Site) -> list[str]:
    answer = await place.stub.ListModels(inference_pb2.ListModelsRequest())
    return [model.name for model in answer.models]


async def until_named(place: Site, *wanted: str) -> None:
    async def is_so() -> bool:
        return set(await names(place)) == set(wanted)

    await eventually(is_so)


@on_each_loop
async def test_a_request_goes_to_the_replicas_of_its_model_and_unknown_ones_are_told_the_known():
    one, other = await two_models()
    async with site(one, other) as place:
        await place.stub.Generate(request(model="model-a"))
        assert (len(one.submits), len(other.submits)) == (1, 0)
        await place.stub.Generate(request(model="model-b"))
        assert (len(one.submits), len(other.submits)) == (1, 1)
        unknown = await refusal(place.stub.Generate(request(model="model-c")))
        assert unknown.code == "NOT_FOUND"
        assert "model-a" in unknown.message
        assert "model-b" in unknown.message
        unnamed = await refusal(place.stub.Generate(request()))
        assert (unnamed.code, unnamed.field) == ("INVALID_ARGUMENT", "model")


@on_each_loop
async def test_the_open_inference_protocol_finds_each_model_by_its_name():
    one, other = await two_models()
    async with site(one, other) as place:
        stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(place.channel)
        await stub.ModelInfer(infer("hello", model_name="model-b"))
        assert (len(one.submits), len(other.submits)) == (0, 1)
        for name, is_ready in (("model-a", True), ("model-c", False)):
            assert (await stub.ModelReady(grpc_service_pb2.ModelReadyRequest(name=name))).ready == is_ready
        unknown = await refusal(stub.ModelInfer(infer("hello", model_name="model-c")))
        assert unknown.code == "NOT_FOUND"
        assert "model-a" in unknown.message


@on_each_loop
async def test_http_lists_the_models_and_serves_each():
    one, other = await two_models()
    async with (
        site(one, other, http=True) as place,
        httpx2.AsyncClient(base_url=f"http://{place.router.http_address}") as http,
    ):
        listed = (await http.get("/v1/models")).json()
        assert {model["id"] for model in listed["data"]} == {"model-a", "model-b"}
        body = {"model": "model-b", "prompt": "hello", "max_tokens": 4}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert (len(one.submits), len(other.submits)) == (0, 1)
        unknown = await http.post("/v1/completions", json=body | {"model": "model-c"})
        assert unknown.status_code == 404
        assert "model-a" in unknown.json()["error"]["message"]


@on_each_loop
async def test_a_model_comes_and_goes_while_the_router_runs_and_its_streams_end_normally():
    one, other = await two_models()
    async with site(one) as place:
        place.directory.set([one.endpoint, other.endpoint])
        await until_named(place, "model-a", "model-b")
        other.pause()
        stream = asyncio.create_task(
            collected(place.stub.GenerateStream(request(model="model-b", max_tokens=30, seed=5)))
        )
        await other.until(lambda: other.running)
        place.directory.set([one.endpoint], removed_models=["model-b"])
        await until_named(place, "model-a")
        refused = await refusal(place.stub.Generate(request(model="model-b")))
        assert (refused.code, "model-a" in refused.message) == ("NOT_FOUND", True)
        assert (await place.stub.Generate(request())).model == "model-a"  # the only one, and needs no name
        other.resume()
        assert "".join(chunk.text for chunk in await stream) == expected("hello", 5, 30)[1]
        await other.kill()
        place.directory.set([one.endpoint])


@on_each_loop
async def test_streams_of_a_removed_model_that_outlast_its_replicas_are_refused_by_name():
    one, other = await two_models()
    async with site(one, other) as place:
        other.pause()
        stream = asyncio.create_task(refusal(collected(place.stub.GenerateStream(request(model="model-b")))))
        await other.until(lambda: other.running)
        place.directory.set([one.endpoint], removed_models=["model-b"])
        await until_named(place, "model-a")
        await other.kill()
        place.replicas.remove(other)
        message = await stream
        assert (message.code, "'model-b' is not served here" in message.message) == ("NOT_FOUND", True)


@on_each_loop
async def test_health_knows_each_model_and_forgets_a_removed_one():
    one, other = await two_models()
    async with site(one, other) as place:
        health = health_pb2_grpc.HealthStub(place.channel)
        watch: AsyncIterator = aiter(health.Watch(health_pb2.HealthCheckRequest(service="model-b")))
        assert MessageToDict(await anext(watch)) == {"status": "SERVING"}
        place.directory.set([one.endpoint], removed_models=["model-b"])
        assert MessageToDict(await anext(watch)) == {"status": "SERVICE_UNKNOWN"}
        overall = await health.Check(health_pb2.HealthCheckRequest())
        assert MessageToDict(overall) == {"status": "SERVING"}


@on_each_loop
async def test_a_name_that_another_model_takes_over_is_read_with_its_own_tokenizer():
    first = await FakeReplica.start("r-1", "fake")
    loaded: list[str] = []
    async with site(first, load_tokenizer=noting(loaded)) as place:
        place.directory.set([], removed_models=["fake"])
        await until_named(place)
        await first.kill()
        second = await FakeReplica.start("r-2", "fake")
        endpoint = second.endpoint
        object.__setattr__(endpoint, "model_path", "/elsewhere")
        place.directory.set([endpoint])
        place.replicas[:] = [second]
        await place.until_up(1)
        upper = await place.stub.Tokenize(inference_pb2.TokenizeRequest(text="a"))
        assert list(upper.token_ids) == [ord("A")]
        assert loaded == ["/nowhere", "/elsewhere"]
        await second.kill()


@on_a_loop
async def test_each_model_has_the_chat_template_that_was_given_for_it():
    """Whatever the tokenizer's own is. A replica with another template, as after an update, changes it."""
    one, other = await two_models()
    other.chat_template = "{% for m in messages %}({{ m.content }}){% endfor %}"
    load = lambda path: byte_tokenizer(path, "{% for m in messages %}<{{ m.content }}>{% endfor %}")  # noqa: E731
    async with site(one, other, load_tokenizer=load, http=True) as place:
        url = f"http://{place.router.http_address}"
        async with httpx2.AsyncClient(base_url=url, verify=False) as client:
            shown = {model["id"]: model["chat_template"] for model in (await client.get("/v1/models")).json()["data"]}
            assert shown == {"model-a": "own", "model-b": "given"}
            assert [await asked(client, replica) for replica in (one, other)] == ["<hi>", "(hi)"]
            new = await FakeReplica.start("r-c", "model-b")
            new.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
            place.directory.set([one.endpoint, new.endpoint])
            await other.kill()
            place.replicas[1:] = [new]
            await new.until(lambda: new.num_links)
            await eventually(lambda: has_replica(place, "r-c"))
            assert await asked(client, new) == "[hi]"
        await new.kill()


async def asked(client: httpx2.AsyncClient, replica: FakeReplica) -> str:
    """The prompt that a replica gets of a chat."""
    body = {"model": replica.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    return bytes(replica.submits[0].prompt_token_ids).decode()


async def has_replica(place: Site, replica_id: str) -> bool:
    load = await place.stub.GetLoad(inference_pb2.GetLoadRequest())
    return replica_id in {one.replica_id for one in load.replicas}


def noting(loaded: list[str]) -> Callable[[str], Tokenizer]:
    """A loader; the tokenizer of another folder reads capitals alone."""

    class Capitals(ByteCodec):
        def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
            return super().encode(text.upper(), add_special_tokens)

    def load(path: str) -> Tokenizer:
        loaded.append(path)
        return byte_tokenizer() if path == "/nowhere" else Tokenizer(Capitals(), special_tokens={})

    return load


@pytest.mark.parametrize("removed", [[], ["fake"]], ids=["lost", "removed"])
@on_each_loop
async def test_only_a_removed_model_is_unknown_one_without_replicas_is_unavailable(removed):
    replica = await FakeReplica.start()
    async with site(replica) as place:
        place.directory.set([], removed_models=removed)
        await replica.kill()
        await place.until_up(0)
        if removed:
            await until_named(place)
        message = await refusal(place.stub.Generate(request(model="fake", timeout_ms=50)))
        assert message.code == ("UNAVAILABLE" if removed else "DEADLINE_EXCEEDED")

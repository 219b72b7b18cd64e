"""API keys at every API of a router: who is let in, what each answers to who is not, and what is open for everyone."""

import asyncio
import json

import grpc
import httpx
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from holdfast.foreign import grpc_service_pb2 as oip
from holdfast.foreign import grpc_service_pb2_grpc, health_pb2, health_pb2_grpc
from holdfast.router.config import LimitsConfig
from holdfast.router.security.gate import UNKNOWN, Gate
from holdfast.v1 import inference_pb2
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.router.api.http.test_openai_sdk import TEMPLATE
from tests.router.api.open_inference.messages import infer
from tests.router.security.test_gate import Keys, key_of, secret_of
from tests.router.site import collected, expected, refusal, request, site, with_key

OPERATOR = secret_of("op")
KEY_A, KEY_B = with_key(secret_of("a")), with_key(secret_of("b"))
BAD = ("", secret_of("a")[:-1], secret_of("a") + "x", "hfk_", "é" * 3)


def locked(*keys, token: str | None = None, **limits) -> dict:
    """Arguments of a site whose gate asks for one of these keys, or for the operator's."""
    gate = Gate(Keys(key_of("op", operator=True, max_priority="critical"), *keys), cluster_token=token)
    load = lambda path: byte_tokenizer(path, TEMPLATE)  # noqa: E731
    return {"gate": gate, "key": OPERATOR, "limits": LimitsConfig(**limits), "load_tokenizer": load}


def grpc_calls(place, metadata):
    """One call of each kind that asks for a key."""
    ours, other = place.stub, grpc_service_pb2_grpc.GRPCInferenceServiceStub(place.channel)
    reflect = reflection_pb2_grpc.ServerReflectionStub(place.channel)

    async def first(call):
        return await anext(aiter(call))

    yield ours.Generate(request(), metadata=metadata)
    yield first(ours.GenerateStream(request(), metadata=metadata))
    yield ours.Abort(inference_pb2.AbortRequest(request_id="x"), metadata=metadata)
    yield ours.Tokenize(inference_pb2.TokenizeRequest(text="x"), metadata=metadata)
    yield ours.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[97]), metadata=metadata)
    yield ours.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
    yield other.ModelInfer(infer(), metadata=metadata)
    yield first(other.ModelStreamInfer(iter([infer()]), metadata=metadata))
    yield other.ModelMetadata(oip.ModelMetadataRequest(name="fake"), metadata=metadata)
    yield other.ModelStatistics(oip.ModelStatisticsRequest(), metadata=metadata)
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    yield first(reflect.ServerReflectionInfo(iter([listing]), metadata=metadata))


async def grpc_refusals(place, metadata):
    """What the same calls say, which all must fail.

    grpc.aio now and then loses the status of a stream that it still writes to when the status comes: it is asked again.
    """
    for _ in range(5):
        found = [await refusal(call) for call in grpc_calls(place, metadata)]
        if all(refused.message != "Internal error from Core" for refused in found):
            break
    return found


HTTP_POSTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/responses/input_tokens": {"model": "fake", "input": "x"},
    "/v1/messages/count_tokens": {"model": "fake", "messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [97]},
}
HTTP_GETS = ("/v1/models", "/v1/models/fake", "/version", "/openapi.json")
OF_OPERATORS = ("/load", "/metrics")


@on_a_loop
async def test_grpc_lets_in_who_has_a_key_and_answers_all_others_alike():
    async with site(await FakeReplica.start(), **locked(key_of("a"))) as place:
        for call in grpc_calls(place, with_key(secret_of("a"))):
            await call
        for bad in BAD:
            if not bad.isascii():
                continue  # gRPC itself refuses to send it
            for refused in await grpc_refusals(place, with_key(bad)):
                assert (refused.code, refused.message) == ("UNAUTHENTICATED", UNKNOWN)


@on_a_loop
async def test_http_lets_in_who_has_a_key_and_answers_all_others_alike():
    async with (
        site(await FakeReplica.start(), http=True, **locked(key_of("a"))) as place,
        httpx.AsyncClient(base_url=f"http://{place.router.http_address}") as client,
    ):
        for headers in ({"authorization": f"Bearer {secret_of('a')}"}, {"x-api-key": secret_of("a")}):
            for path, body in HTTP_POSTS.items():
                assert (await client.post(path, json=body, headers=headers)).status_code == 200, path
            for path in HTTP_GETS:
                assert (await client.get(path, headers=headers)).status_code == 200, path
            for path in OF_OPERATORS:
                assert (await client.get(path, headers=headers)).status_code == 403, path
        for path in OF_OPERATORS:
            assert (await client.get(path, headers={"x-api-key": OPERATOR})).status_code == 200, path
        bodies = set()
        for bad in BAD:
            headers = {"authorization": f"Bearer {bad}".encode()} if bad else {}
            for path in (*HTTP_POSTS, *HTTP_GETS, *OF_OPERATORS):
                call = client.post if path in HTTP_POSTS else client.get
                refused = await call(path, headers=headers)
                assert refused.status_code == 401, path
                assert refused.headers["www-authenticate"] == "Bearer"
                bodies.add(refused.text)
        assert len(bodies) == 2  # in OpenAI's words, and in Anthropic's
        assert all(UNKNOWN in text for text in bodies)


@on_a_loop
async def test_health_and_readiness_are_open():
    async with site(await FakeReplica.start(), http=True, **locked()) as place:
        health = health_pb2_grpc.HealthStub(place.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        assert (await anext(aiter(health.Watch(health_pb2.HealthCheckRequest())))).status
        stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(place.channel)
        assert (await stub.ServerLive(oip.ServerLiveRequest())).live
        assert (await stub.ServerReady(oip.ServerReadyRequest())).ready
        refused = await refusal(stub.ModelReady(oip.ModelReadyRequest(name="fake")))
        assert refused.code == "UNAUTHENTICATED"
        async with httpx.AsyncClient(base_url=f"http://{place.router.http_address}") as client:
            for path in ("/health", "/ready", "/ping"):
                assert (await client.get(path)).status_code == 200


@on_a_loop
async def test_load_and_connections_are_for_operators():
    async with site(await FakeReplica.start(), admin_port=0, **locked(key_of("a"))) as place:
        load = inference_pb2.GetLoadRequest()
        assert (await refusal(place.stub.GetLoad(load, metadata=with_key(secret_of("a"))))).code == "PERMISSION_DENIED"
        assert (await place.stub.GetLoad(load, metadata=with_key(OPERATOR))).replicas
        async with grpc.aio.insecure_channel(place.router.admin_address) as channel:
            stub, asked = channelz_pb2_grpc.ChannelzStub(channel), channelz_pb2.GetServersRequest()
            assert (await refusal(stub.GetServers(asked))).code == "UNAUTHENTICATED"
            assert (
                await refusal(stub.GetServers(asked, metadata=with_key(secret_of("a"))))
            ).code == "PERMISSION_DENIED"
            assert (await stub.GetServers(asked, metadata=with_key(OPERATOR))).server


@on_a_loop
async def test_a_key_has_its_models_and_sees_no_others():
    replicas = [await FakeReplica.start("r0", "fake"), await FakeReplica.start("r1", "other")]
    async with site(*replicas, http=True, **locked(key_of("a", models=["fake"]))) as place:
        metadata = with_key(secret_of("a"))
        listed = await place.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
        assert [model.name for model in listed.models] == ["fake"]
        answer = await place.stub.Generate(request(), metadata=metadata)  # the only one that it sees
        assert answer.model == "fake"
        for name in ("other", "no-such-model"):
            for call in (
                place.stub.Generate(request(model=name), metadata=metadata),
                place.stub.Tokenize(inference_pb2.TokenizeRequest(model=name, text="x"), metadata=metadata),
            ):
                refused = await refusal(call)
                assert (refused.code, refused.message) == (
                    "PERMISSION_DENIED",
                    f"the key 'a' may not use the model '{name}'",
                )
        headers = {"x-api-key": secret_of("a")}
        async with httpx.AsyncClient(base_url=f"http://{place.router.http_address}", headers=headers) as client:
            assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["fake"]
            refused = await client.post("/v1/completions", json={"prompt": "x", "model": "other"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (403, "model")


@on_a_loop
async def test_tenant_and_priority_are_the_keys_own():
    replica = await FakeReplica.start()
    async with site(replica, http=True, **locked(key_of("a", tenant="acme"))) as place:
        metadata = with_key(secret_of("a"))
        await place.stub.Generate(request(), metadata=metadata)
        assert replica.submits[-1].tenant == "acme"
        refused = await refusal(place.stub.Generate(request(tenant="rival"), metadata=metadata))
        assert refused.code == "PERMISSION_DENIED"
        refused = await refusal(place.stub.Generate(request(priority="PRIORITY_HIGH"), metadata=metadata))
        assert (refused.code, "normal at most" in refused.message) == ("PERMISSION_DENIED", True)
        headers = {"x-api-key": secret_of("a")}
        async with httpx.AsyncClient(base_url=f"http://{place.router.http_address}", headers=headers) as client:
            body = {"prompt": "x", "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert replica.submits[-1].tenant == "acme"
            assert (await client.post("/v1/completions", json=body, headers={"x-tenant": "rival"})).status_code == 403
            assert (await client.post("/v1/completions", json=body | {"priority": "high"})).status_code == 403


@on_a_loop
async def test_a_rate_that_is_used_up_is_told_with_the_time_to_come_again():
    keys = key_of("a", requests_per_minute=6), key_of("b", tokens_per_minute=6), key_of("c")
    async with site(await FakeReplica.start(), http=True, **locked(*keys)) as place:
        for name, rate in (("a", "requests_per_minute"), ("b", "tokens_per_minute")):
            await place.stub.Generate(request(), metadata=with_key(secret_of(name)))
            refused = await refusal(place.stub.Generate(request(), metadata=with_key(secret_of(name))))
            assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "RATE_LIMIT")
            assert rate in refused.message
            assert refused.retry_after_s > 5
        await place.stub.Generate(request(), metadata=with_key(secret_of("c")))
        async with httpx.AsyncClient(base_url=f"http://{place.router.http_address}") as client:
            body, headers = {"prompt": "x"}, {"x-api-key": secret_of("a")}
            refused = await client.post("/v1/completions", json=body, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert int(refused.headers["retry-after"]) > 5


@on_a_loop
async def test_a_tenant_touches_no_request_of_another():
    replica = await FakeReplica.start()
    async with site(replica, **locked(key_of("a"), key_of("b"))) as place:
        replica.pause()
        stream = place.stub.GenerateStream(request(request_id="mine", seed=4), metadata=with_key(secret_of("a")))
        await replica.until(lambda: len(replica.running) == 1)
        abort = inference_pb2.AbortRequest(request_id="mine")
        assert not (await place.stub.Abort(abort, metadata=with_key(secret_of("b")))).was_open
        other = place.stub.GenerateStream(request(request_id="mine", seed=9), metadata=with_key(secret_of("b")))
        await replica.until(lambda: len(replica.running) == 2)
        replica.resume()
        assert "".join(chunk.text for chunk in await collected(stream)) == expected("hello", 4, 8)[1]
        assert "".join(chunk.text for chunk in await collected(other)) == expected("hello", 9, 8)[1]
        replica.pause()
        stream = place.stub.GenerateStream(request(request_id="mine"), metadata=with_key(secret_of("a")))
        await replica.until(lambda: len(replica.running) == 1)
        assert (await place.stub.Abort(abort, metadata=with_key(secret_of("a")))).was_open
        replica.resume()
        assert (await collected(stream))[-1].finish_reason == inference_pb2.FINISH_REASON_ABORT


@on_a_loop
async def test_a_tenant_has_as_many_requests_open_as_it_may():
    replica = await FakeReplica.start()
    async with site(replica, **locked(key_of("a"), key_of("b"), max_open_per_tenant=2)) as place:
        replica.pause()
        streams = [place.stub.GenerateStream(request(), metadata=with_key(secret_of("a"))) for _ in range(2)]
        await replica.until(lambda: len(replica.running) == 2)
        refused = await refusal(place.stub.Generate(request(), metadata=with_key(secret_of("a"))))
        assert refused.code == "RESOURCE_EXHAUSTED"
        assert "limits.max_open_per_tenant" in refused.message
        other = asyncio.ensure_future(
            collected(place.stub.GenerateStream(request(), metadata=with_key(secret_of("b"))))
        )
        await replica.until(lambda: len(replica.running) == 3)
        replica.resume()
        for stream in streams:
            await collected(stream)
        assert await other
        await place.stub.Generate(request(), metadata=with_key(secret_of("a")))


@on_a_loop
async def test_calls_of_the_routers_own_process_need_no_key():
    from holdfast.router.request import GenerationRequest
    from holdfast.worker.sampling_params import SamplingParams

    async with site(await FakeReplica.start(), **locked()) as place:
        asked = GenerationRequest(prompt="x", sampling_params=SamplingParams(max_tokens=2), tenant="t")
        assert (await place.router.in_process.generate(asked)).completions
        assert [chunk async for chunk in place.router.in_process.stream(asked)]


@on_a_loop
async def test_a_refused_body_is_not_read():
    """Whoever has no key cannot make a router take in megabytes."""
    async with site(await FakeReplica.start(), http=True, **locked()) as place:
        reader, writer = await asyncio.open_connection(*place.router.http_address.split(":"))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 30000000\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"401"
        writer.close()


@pytest.mark.slow
@on_a_loop
async def test_ten_thousand_fuzzed_keys_get_one_answer():
    """At the APIs, over both protocols: half of them begin as a valid key does."""
    import random

    rng = random.Random(7)
    letters = "abcdefghijklmnopqrstuvwxyz_-0123456789"
    patient = {"max_unauthenticated_calls_per_s": 10**6}
    async with site(await FakeReplica.start(), http=True, **locked(key_of("a"), **patient)) as place:
        answers = set()

        def drawn() -> str:
            begin = secret_of("a")[: rng.randrange(len(secret_of("a")))] if rng.random() < 0.5 else ""
            return begin + "".join(rng.choices(letters, k=rng.randrange(1, 60)))

        async with httpx.AsyncClient(base_url=f"http://{place.router.http_address}") as client:
            for _ in range(5_000):
                refused = await refusal(place.stub.Generate(request(), metadata=with_key(drawn())))
                answers.add((refused.code, refused.message, refused.reason))
                response = await client.get("/v1/models", headers={"x-api-key": drawn()})
                headers = tuple(sorted(item for item in response.headers.items() if item[0] != "date"))
                answers.add((response.status_code, response.text, headers))
        assert len(answers) == 2
        assert all(json.dumps(UNKNOWN)[1:-1] in str(answer) for answer in answers)


@on_a_loop
async def test_keys_are_exchanged_while_a_stream_runs():
    replica, keys = await FakeReplica.start(), locked(key_of("a"))
    async with site(replica, **keys) as place:
        replica.pause()
        stream = place.stub.GenerateStream(request(), metadata=with_key(secret_of("a")))
        await replica.until(lambda: len(replica.running) == 1)
        source = keys["gate"]._keys
        source.now = source.now.without("a").with_key(key_of("b"))
        assert (
            await refusal(place.stub.Generate(request(), metadata=with_key(secret_of("a"))))
        ).code == "UNAUTHENTICATED"
        replica.resume()
        assert await collected(stream)
        await place.stub.Generate(request(), metadata=with_key(secret_of("b")))

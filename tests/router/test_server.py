"""The whole router over real gRPC on loopback, with fake replicas behind it."""

import asyncio
import functools

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from holdfast_pb import engine_pb2, inference_pb2, inference_pb2_grpc
from router.config import LimitsConfig, RouterConfig
from tests.fakes import FakeReplica, Wire, fake_tokens
from tests.router.site import Refusal, collected, eventually, refusal, request, site, taken_apart


def on_a_loop(test):
    """Runs a coroutine test to its end, on a loop of its own."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


def expected(prompt: str, seed: int, num_tokens: int) -> tuple[list[int], str]:
    token_ids = fake_tokens(prompt.encode(), seed, num_tokens)
    return token_ids, bytes(token_ids).decode()


# --- answers ---


@on_a_loop
async def test_generate_answers_once():
    async with site(await FakeReplica.start()) as place:
        answer = await place.stub.Generate(request("hello", max_tokens=8, request_id="mine"))
        token_ids, text = expected("hello", 1, 8)
        (completion,) = answer.completions
        assert (list(completion.token_ids), completion.text) == (token_ids, text)
        assert completion.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        assert (answer.request_id, answer.model) == ("mine", "fake")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)


@on_a_loop
async def test_generate_stream_answers_in_chunks_that_continue_each_other():
    async with site(await FakeReplica.start()) as place:
        chunks = await collected(place.stub.GenerateStream(request("hello", max_tokens=20)))
        token_ids, text = expected("hello", 1, 20)
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == token_ids
        assert "".join(chunk.text for chunk in chunks) == text
        num_tokens = 0
        for chunk in chunks:
            assert chunk.first_token_index == num_tokens
            assert chunk.request_id == chunks[0].request_id != ""
            num_tokens += len(chunk.token_ids)
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [0] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (5, 20)


@on_a_loop
async def test_token_ids_are_taken_as_they_are():
    async with site(await FakeReplica.start()) as place:
        answer = await place.stub.Generate(request([1, 2, 3], max_tokens=4))
        assert list(answer.completions[0].token_ids) == fake_tokens([1, 2, 3], 1, 4)


@on_a_loop
async def test_a_stop_string_ends_the_text_and_frees_the_replica():
    async with site(await FakeReplica.start()) as place:
        _, text = expected("hello", 1, 50)
        params = inference_pb2.SamplingParams(max_tokens=0xFFFF, seed=1, stop=[text[4:7]])
        answer = await place.stub.Generate(request("hello", sampling_params=params))
        assert answer.completions[0].text == text[:4]
        assert answer.completions[0].finish_reason == inference_pb2.FINISH_REASON_STOP
        assert answer.usage.completion_tokens == 7
        await place.replicas[0].until(lambda: place.replicas[0].aborted)


@on_a_loop
async def test_what_is_unset_takes_defaults_and_what_is_set_arrives():
    async with site(await FakeReplica.start()) as place:
        await place.stub.Generate(inference_pb2.GenerateRequest(text="x", request_id="fixed"))
        params = inference_pb2.SamplingParams(
            temperature=0.7, top_k=5, top_p=0.9, seed=7, max_tokens=2, stop_token_ids=[3], ignore_eos=True
        )
        priority = inference_pb2.PRIORITY_CRITICAL
        await place.stub.Generate(inference_pb2.GenerateRequest(text="x", sampling_params=params, priority=priority))
        plain, full = place.replicas[0].submits
        assert (plain.draw.temperature, plain.draw.top_k, plain.draw.top_p, plain.draw.max_tokens) == (1.0, 0, 1.0, 16)
        assert plain.priority == 2
        draw = engine_pb2.DrawSettings(
            temperature=0.7, top_k=5, top_p=0.9, seed=7, max_tokens=2, stop_token_ids=[3], ignore_eos=True
        )
        assert full.draw == draw, "0.7 and not 0.699999988"
        assert full.priority == 0


@on_a_loop
async def test_the_seed_of_an_unseeded_request_follows_from_its_id():
    async with site(await FakeReplica.start()) as place:
        for request_id in ("a", "a", "b"):
            await place.stub.Generate(inference_pb2.GenerateRequest(text="x", request_id=request_id))
        first, again, other = (submit.draw.seed for submit in place.replicas[0].submits)
        assert first == again != other


@on_a_loop
async def test_the_request_id_is_in_the_headers_at_once():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        call = place.stub.GenerateStream(request(request_id="mine"))
        assert dict(await call.initial_metadata())["x-request-id"] == "mine"
        replica.resume()
        await collected(call)


@on_a_loop
async def test_tokenize_and_detokenize_are_inverse():
    async with site(await FakeReplica.start()) as place:
        tokens = await place.stub.Tokenize(inference_pb2.TokenizeRequest(model="fake", text="héllo"))
        assert list(tokens.token_ids) == list("héllo".encode())
        answer = await place.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
        assert answer.text == "héllo"


@on_a_loop
async def test_long_texts_are_tokenized_on_a_thread():
    async with site(await FakeReplica.start()) as place:
        text = "x" * 50_000
        assert len((await place.stub.Tokenize(inference_pb2.TokenizeRequest(text=text))).token_ids) == 50_000
        answer = await place.stub.Generate(request(text, max_tokens=1))
        assert answer.usage.prompt_tokens == 50_000


@on_a_loop
async def test_models_and_load_are_reported():
    async with site(await FakeReplica.start("r0"), await FakeReplica.start("r1")) as place:
        (model,) = (await place.stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert (model.name, model.num_replicas, model.max_model_len, model.vocab_size) == ("fake", 2, 100_000, 256)
        assert (model.tensor_parallel_size, model.row_invariant) == (2, True)
        load = await place.stub.GetLoad(inference_pb2.GetLoadRequest())
        assert (load.num_queued, load.num_open) == (0, 0)
        assert sorted(replica.replica_id for replica in load.replicas) == ["r0", "r1"]
        assert load.replicas[0].num_total_blocks == 9


@on_a_loop
async def test_64_streams_at_once_over_two_replicas_are_all_right():
    async with site(await FakeReplica.start("r0"), await FakeReplica.start("r1")) as place:

        async def one(index: int) -> str:
            chunks = await collected(place.stub.GenerateStream(request(f"prompt {index}", max_tokens=30, seed=index)))
            return "".join(chunk.text for chunk in chunks)

        texts = await asyncio.gather(*(one(index) for index in range(64)))
        assert texts == [expected(f"prompt {index}", index, 30)[1] for index in range(64)]
        num_submits = [len(replica.submits) for replica in place.replicas]
        assert sum(num_submits) == 64
        assert min(num_submits) >= 24


# --- refusals ---


def params(**fields) -> dict:
    return {"sampling_params": inference_pb2.SamplingParams(**fields)}


BAD_REQUESTS = {
    "empty text": ({"text": ""}, "text", "must not be empty"),
    "no token ids": ({"token_ids": inference_pb2.TokenIds()}, "token_ids", "must not be empty"),
    "no prompt": ({}, "prompt", "one of text and token_ids"),
    "longer than the context": ({"text": "x" * 100_000}, "text", "maximum context length is 100000 tokens"),
    "1 MB prompt": ({"text": "x" * 10**6}, "text", "limits.max_prompt_bytes"),
    "token id out of range": ({"token_ids": inference_pb2.TokenIds(ids=[1, 256])}, "token_ids", "256"),
    "max_tokens 0": (params(max_tokens=0), "sampling_params.max_tokens", "at least 1"),
    "max_tokens -1": (params(max_tokens=-1), "sampling_params.max_tokens", "at least 1"),
    "temperature NaN": (params(temperature=float("nan")), "sampling_params.temperature", "[0, 100]"),
    "temperature inf": (params(temperature=float("inf")), "sampling_params.temperature", "[0, 100]"),
    "temperature -1": (params(temperature=-1), "sampling_params.temperature", "[0, 100]"),
    "top_p 0": (params(top_p=0), "sampling_params.top_p", "(0, 1]"),
    "top_p 2": (params(top_p=2), "sampling_params.top_p", "(0, 1]"),
    "top_k -2": (params(top_k=-2), "sampling_params.top_k", "at least 1"),
    "negative seed": (params(seed=-1), "sampling_params.seed", "9223372036854775807"),
    "empty stop string": (params(stop=["a", ""]), "sampling_params.stop", "must not be empty"),
    "too many stop strings": (params(stop=["x"] * 65), "sampling_params.stop", "at most 64"),
    "long stop string": (params(stop=["x" * 1025]), "sampling_params.stop", "at most 1024"),
    "stop token out of range": (params(stop_token_ids=[999]), "sampling_params.stop_token_ids", "vocabulary"),
    "unknown priority": ({"priority": 99}, "priority", "holdfast.v1.Priority"),
    "timeout 0": ({"timeout_ms": 0}, "timeout_ms", "[1, 3600000]"),
    "timeout too long": ({"timeout_ms": 2**32 - 1}, "timeout_ms", "[1, 3600000]"),
    "long request id": ({"request_id": "x" * 129}, "request_id", "at most 128"),
    "request id with a newline": ({"request_id": "a\nb"}, "request_id", "printable ASCII"),
}


@on_a_loop
async def test_bad_input_is_refused_by_name_and_the_server_goes_on():
    async with site(await FakeReplica.start()) as place:
        for name, (fields, field, limit) in BAD_REQUESTS.items():
            given = {"text": "x"} if set(fields) & {"sampling_params", "priority", "timeout_ms", "request_id"} else {}
            message = inference_pb2.GenerateRequest(**given, **fields)
            for call in (place.stub.Generate(message), collected(place.stub.GenerateStream(message))):
                refused = await refusal(call)
                assert (refused.code, refused.reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST"), name
                assert refused.field == field, name
                assert limit in refused.message, name
                assert len(refused.message) < 500, name
        assert place.replicas[0].submits == []
        assert (await place.stub.Generate(request())).usage.completion_tokens == 8


@on_a_loop
async def test_an_unknown_model_is_not_found_and_the_served_ones_are_named():
    async with site(await FakeReplica.start()) as place:
        for call in (
            place.stub.Generate(request(model="gpt-9")),
            place.stub.Tokenize(inference_pb2.TokenizeRequest(model="gpt-9", text="x")),
            place.stub.Detokenize(inference_pb2.DetokenizeRequest(model="gpt-9", token_ids=[1])),
        ):
            refused = await refusal(call)
            assert (refused.code, refused.reason) == ("NOT_FOUND", "UNKNOWN_MODEL")
            assert "served: fake" in refused.message


@on_a_loop
async def test_a_model_must_be_named_where_there_are_several():
    async with site(await FakeReplica.start("r0", "one"), await FakeReplica.start("r1", "two")) as place:
        refused = await refusal(place.stub.Generate(request()))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "model")
        assert (await place.stub.Generate(request(model="two"))).model == "two"


@on_a_loop
async def test_bytes_that_are_no_message_are_refused_and_the_server_goes_on():
    async with site(await FakeReplica.start()) as place:
        for method in ("Generate", "Tokenize"):
            raw = place.channel.unary_unary(f"/holdfast.v1.Inference/{method}")
            for data in (b"\x0a\x02\xff\xfe", b"\xff\xff\xff"):
                refused = await refusal(raw(data))
                assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "request")
                assert "UTF-8" in refused.message
        stream = place.channel.unary_stream("/holdfast.v1.Inference/GenerateStream")
        assert (await refusal(collected(stream(b"\x0a\x02\xff\xfe")))).code == "INVALID_ARGUMENT"
        assert (await place.stub.Generate(request())).usage.completion_tokens == 8


@on_a_loop
async def test_unknown_fields_are_ignored():
    async with site(await FakeReplica.start()) as place:
        raw = place.channel.unary_unary("/holdfast.v1.Inference/Generate")
        data = request("x", max_tokens=2).SerializeToString() + b"\xfa\x3f\x03abc"
        answer = inference_pb2.GenerateResponse.FromString(await raw(data))
        assert answer.usage.completion_tokens == 2


@on_a_loop
async def test_a_sequence_that_no_cache_holds_is_refused():
    replica = await FakeReplica.start()
    replica.num_blocks = 4
    async with site(replica) as place:
        refused = await refusal(place.stub.Generate(request("x" * 64)))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "text")
        assert "KV cache holds 64 tokens" in refused.message


@on_a_loop
async def test_detokenizing_checks_its_tokens():
    async with site(await FakeReplica.start()) as place:
        refused = await refusal(place.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[256])))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "token_ids")
        many = inference_pb2.DetokenizeRequest(token_ids=[1] * 100_001)
        assert "at most 100000" in (await refusal(place.stub.Detokenize(many))).message


@on_a_loop
async def test_a_replicas_refusals_reach_the_client():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        replica.refusal = engine_pb2.Rejection(field="prompt", message="needs 9 blocks, there are 8")
        refused = await refusal(place.stub.Generate(request()))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "prompt")
        assert refused.message == "prompt: needs 9 blocks, there are 8"
        replica.refusal = engine_pb2.Rejection(message="1024 requests wait already", retry_after_ms=250)
        refused = await refusal(place.stub.Generate(request()))
        assert (refused.code, refused.retry_after_s) == ("RESOURCE_EXHAUSTED", 0.25)


@on_a_loop
async def test_a_full_queue_says_when_to_come_back():
    replica = await FakeReplica.start()
    replica.pause()
    config, limits = RouterConfig(max_waiting_per_replica=1), LimitsConfig(max_queued=1)
    async with site(replica, config=config, limits=limits) as place:
        calls = [place.stub.Generate(request()) for _ in range(2)]
        await replica.until(lambda: replica.running)
        await eventually(lambda: num_open_is(place, 2))
        refused = await refusal(place.stub.Generate(request()))
        assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert refused.retry_after_s > 0
        replica.resume()
        await asyncio.gather(*calls)


async def num_open_is(place, count: int) -> bool:
    return place.router.num_open == count


@on_a_loop
async def test_an_id_in_use_is_refused():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        first = place.stub.Generate(request(request_id="same"))
        await replica.until(lambda: replica.running)
        refused = await refusal(place.stub.Generate(request(request_id="same")))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "request_id")
        replica.resume()
        assert (await first).usage.completion_tokens == 8


# --- cancel and deadlines ---


@on_a_loop
async def test_a_cancelled_call_is_off_the_replica_within_a_step():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        call = place.stub.GenerateStream(request(max_tokens=10**6))
        await anext(aiter(call))
        (attempt,) = replica.running
        num_steps = replica.num_steps
        call.cancel()
        await replica.until(lambda: replica.aborted == [attempt])
        assert replica.num_steps - num_steps < 100, "an abort, and not the end of the sequence"
        await place.until_idle()


@on_a_loop
async def test_a_cancelled_unary_call_is_off_the_replica_too():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        call = place.stub.Generate(request(max_tokens=10**6))
        await replica.until(lambda: replica.running)
        call.cancel()
        await replica.until(lambda: replica.aborted)


@on_a_loop
async def test_a_client_that_hangs_up_is_a_cancel():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        async with grpc.aio.insecure_channel(
            place.router.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            stream = channel.unary_stream("/holdfast.v1.Inference/GenerateStream")
            await anext(aiter(stream(request(max_tokens=10**6).SerializeToString())))
        await replica.until(lambda: replica.aborted)


@on_a_loop
async def test_a_timeout_in_the_request_ends_it():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        for call in (
            place.stub.Generate(request(timeout_ms=50)),
            collected(place.stub.GenerateStream(request(timeout_ms=50))),
        ):
            refused = await refusal(call)
            assert (refused.code, refused.reason) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")
        await replica.until(lambda: len(replica.aborted) == 2)
        replica.resume()


@on_a_loop
async def test_the_calls_own_deadline_ends_it():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        refused = await refusal(place.stub.Generate(request(timeout_ms=60_000), timeout=0.1))
        assert refused.code == "DEADLINE_EXCEEDED"
        await replica.until(lambda: replica.aborted)
        replica.resume()


@on_a_loop
async def test_a_request_without_a_timeout_has_the_servers():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica, limits=LimitsConfig(default_timeout_s=0.05)) as place:
        assert (await refusal(place.stub.Generate(request()))).code == "DEADLINE_EXCEEDED"
        await replica.until(lambda: replica.aborted)
        replica.resume()


# --- replicas come and go ---


@on_a_loop
async def test_a_killed_replica_ends_its_streams_and_the_other_goes_on():
    dying, living = await FakeReplica.start("dying"), await FakeReplica.start("living")
    async with site(dying, living) as place:
        calls = [place.stub.GenerateStream(request(max_tokens=200, seed=seed)) for seed in range(8)]
        await dying.until(lambda: dying.running)
        num_lost = len(dying.running)
        await dying.kill()
        outcomes = await asyncio.gather(*(outcome(call) for call in calls))
        refused = [end for end in outcomes if isinstance(end, Refusal)]
        assert num_lost <= len(refused) <= 4
        assert {(end.code, end.retry_after_s) for end in refused} == {("UNAVAILABLE", 1.0)}
        assert all("replica dying was lost" in end.message for end in refused)
        assert (await place.stub.Generate(request())).usage.completion_tokens == 8


async def outcome(call) -> list | Refusal:
    try:
        return await collected(call)
    except grpc.aio.AioRpcError as error:
        return taken_apart(error)


@on_a_loop
async def test_requests_wait_for_a_replica_that_comes_back():
    first = await FakeReplica.start()
    async with site(first) as place:
        await first.kill()
        await place.until_up(0)
        call = place.stub.Generate(request())
        await eventually(lambda: num_open_is(place, 1))
        again = await FakeReplica.start(port=first.port)
        assert (await call).usage.completion_tokens == 8
        await again.kill()


@on_a_loop
async def test_without_any_replica_a_router_is_unavailable():
    async with site() as place:
        refused = await refusal(place.stub.Generate(request()))
        assert (refused.code, refused.retry_after_s) == ("UNAVAILABLE", 1.0)


@on_a_loop
async def test_a_replica_that_is_lost_for_good_does_not_hold_requests_for_ever():
    replica = await FakeReplica.start()
    async with site(replica, config=RouterConfig(replica_wait_s=0.1)) as place:
        await replica.kill()
        await place.until_up(0)
        refused = await refusal(place.stub.Generate(request()))
        assert refused.code == "UNAVAILABLE"
        assert "no replica of model 'fake' is up" in refused.message


@on_a_loop
async def test_the_directory_adds_retires_and_moves_replicas():
    first, second = await FakeReplica.start("r0"), await FakeReplica.start("r1")
    async with site(first) as place:
        place.directory.set([first.endpoint, second.endpoint])
        await place.until_up(2)
        call = place.stub.GenerateStream(request(max_tokens=100))
        await call.initial_metadata()
        place.directory.set([])
        chunks = await collected(call)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 100
        moved = await FakeReplica.start("r0")
        place.directory.set([moved.endpoint])
        await eventually(lambda: served_by(place, moved))
        await moved.kill()
        await second.kill()


async def served_by(place, replica: FakeReplica) -> bool:
    await place.stub.Generate(request(max_tokens=1))
    return bool(replica.submits)


@on_a_loop
async def test_a_stranger_at_the_address_is_not_taken_for_the_replica():
    stranger, replica = await FakeReplica.start("stranger"), await FakeReplica.start("r1")
    async with site(replica) as place:
        wrong = await FakeReplica.start("r0")
        endpoint = wrong.endpoint
        await wrong.kill()
        impostor = await FakeReplica.start("stranger", port=wrong.port)
        place.directory.set([endpoint, replica.endpoint])
        await eventually(lambda: was_dialled(impostor))
        await place.until_up(1)
        await impostor.kill()
    await stranger.kill()


async def was_dialled(replica: FakeReplica) -> bool:
    return replica.num_links > 0


@on_a_loop
async def test_a_network_that_goes_dark_is_noticed():
    replica = await FakeReplica.start()
    wire = await Wire.start(replica.port)
    config = RouterConfig(keepalive_s=0.1, keepalive_timeout_s=0.1, connect_timeout_s=0.2)
    async with site(config=config) as place:
        place.directory.set([replica.endpoint_at(wire.port)])
        await place.until_up(1)
        call = place.stub.Generate(request(max_tokens=10**6))
        await replica.until(lambda: replica.running)
        wire.go_dark()
        refused = await refusal(call)
        assert (refused.code, refused.reason) == ("UNAVAILABLE", "REPLICA_UNAVAILABLE")
        await place.until_up(0)
        await wire.stop()
        await replica.kill()


# --- slow readers ---


@on_a_loop
async def test_a_slow_reader_holds_up_nobody_and_loses_nothing():
    replica = await FakeReplica.start(step_s=0)
    async with site(replica) as place:
        narrow = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 0)]
        channel = grpc.aio.insecure_channel(place.router.address, options=narrow)
        slow = inference_pb2_grpc.InferenceStub(channel).GenerateStream(request("slow", max_tokens=5_000))
        await replica.until(lambda: replica.running)
        assert (await place.stub.Generate(request("quick", max_tokens=50))).usage.completion_tokens == 50
        await replica.until(lambda: not replica.running)
        chunks = await collected(slow)
        assert len(chunks) < 5_000, "what was not read yet was merged"
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected("slow", 1, 5_000)[0]
        await channel.close()


# --- health and reflection ---


@on_a_loop
async def test_health_follows_the_replicas():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        stub = health_pb2_grpc.HealthStub(place.channel)
        for service in ("", "holdfast.v1.Inference", "fake"):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == 1
        assert (await refusal(stub.Check(health_pb2.HealthCheckRequest(service="other")))).code == "NOT_FOUND"
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service=service)) for service in ("fake", "fake", "other")]
        news = [aiter(watch) for watch in watches]
        assert [(await anext(stream)).status for stream in news] == [1, 1, 3]
        watches[0].cancel()
        await replica.kill()
        assert (await anext(news[1])).status == 2, "one watcher leaving must not silence the others"
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == 2
        for watch in watches:
            watch.cancel()


@on_a_loop
async def test_reflection_names_the_services():
    async with site(await FakeReplica.start()) as place:
        stub = reflection_pb2_grpc.ServerReflectionStub(place.channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert {"holdfast.v1.Inference", "grpc.health.v1.Health"} <= names
        symbol = "holdfast.v1.Inference"
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
        await call.done_writing()
        call.cancel()


# --- stopping ---


@on_a_loop
async def test_stopping_lets_open_requests_end_and_refuses_new_ones():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        stub = health_pb2_grpc.HealthStub(place.channel)
        call = place.stub.Generate(request())
        await replica.until(lambda: replica.running)
        stopping = asyncio.create_task(place.router.stop(grace_s=10))
        await eventually(lambda: not_serving(stub))
        refused = await refusal(place.stub.Generate(request()))
        assert (refused.code, refused.reason) == ("UNAVAILABLE", "STOPPING")
        replica.resume()
        assert (await call).usage.completion_tokens == 8
        await stopping


async def not_serving(stub) -> bool:
    return (await stub.Check(health_pb2.HealthCheckRequest())).status == 2


@on_a_loop
async def test_what_does_not_end_in_time_is_ended_and_told():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        calls = [place.stub.Generate(request()), collected(place.stub.GenerateStream(request()))]
        calls = [asyncio.ensure_future(refusal(call)) for call in calls]
        await replica.until(lambda: len(replica.running) == 2)
        await place.router.stop(grace_s=0.01)
        for refused in await asyncio.gather(*calls):
            assert (refused.code, refused.reason) == ("UNAVAILABLE", "STOPPING")
        await replica.until(lambda: not replica.running)


# --- faults of ours ---


@on_a_loop
async def test_a_link_that_breaks_by_our_fault_answers_its_callers_and_comes_back(caplog):
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        call = place.stub.Generate(request())
        await replica.until(lambda: replica.running)
        replica.say(engine_pb2.StepUpdate(deltas=[engine_pb2.Delta(attempt=1, finish_reason=77)]))
        refused = await refusal(call)
        assert (refused.code, refused.reason) == ("INTERNAL", "INTERNAL")
        assert "failed by a fault of ours" in caplog.text
        replica.resume()
        await place.until_up(1)
        assert (await place.stub.Generate(request())).usage.completion_tokens == 8


@on_a_loop
async def test_a_call_that_breaks_by_our_fault_is_internal_and_logged(monkeypatch, caplog):
    async with site(await FakeReplica.start()) as place:

        def broken(self):
            raise ZeroDivisionError("secret")

        with monkeypatch.context() as patched:
            patched.setattr("router.switchboard.Switchboard.loads", broken)
            refused = await refusal(place.stub.GetLoad(inference_pb2.GetLoadRequest()))
        assert refused.code == "INTERNAL"
        assert "secret" not in refused.message
        assert "secret" in caplog.text

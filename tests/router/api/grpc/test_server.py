"""The whole router over real gRPC on loopback, with fake replicas behind it: answers, slow readers, stopping."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from holdfast.v1 import engine_pb2, inference_pb2, inference_pb2_grpc
from tests.fakes import FakeReplica, fake_tokens
from tests.loops import on_a_loop, on_each_loop
from tests.router.site import collected, eventually, expected, refusal, request, site

# --- answers ---


@on_each_loop
async def test_generate_answers_once():
    async with site(await FakeReplica.start()) as place:
        answer = await place.stub.Generate(request("hello", max_tokens=8, request_id="mine"))
        token_ids, text = expected("hello", 1, 8)
        (completion,) = answer.completions
        assert (list(completion.token_ids), completion.text) == (token_ids, text)
        assert completion.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        assert (answer.request_id, answer.model) == ("mine", "fake")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)


@on_each_loop
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


@on_each_loop
async def test_token_ids_are_taken_as_they_are():
    async with site(await FakeReplica.start()) as place:
        answer = await place.stub.Generate(request([1, 2, 3], max_tokens=4))
        assert list(answer.completions[0].token_ids) == fake_tokens([1, 2, 3], 1, 4)


@on_each_loop
async def test_a_stop_string_ends_the_text_and_frees_the_replica():
    async with site(await FakeReplica.start()) as place:
        _, text = expected("hello", 1, 50)
        params = inference_pb2.SamplingParams(max_tokens=0xFFFF, seed=1, stop=[text[4:7]])
        answer = await place.stub.Generate(request("hello", sampling_params=params))
        assert answer.completions[0].text == text[:4]
        assert answer.completions[0].finish_reason == inference_pb2.FINISH_REASON_STOP
        assert answer.usage.completion_tokens == 7
        await place.replicas[0].until(lambda: place.replicas[0].aborted)


@on_each_loop
async def test_what_is_unset_takes_defaults_and_what_is_set_arrives():
    async with site(await FakeReplica.start()) as place:
        await place.stub.Generate(inference_pb2.GenerateRequest(text="x", request_id="fixed"))
        params = inference_pb2.SamplingParams(
            temperature=0.7, top_k=5, top_p=0.9, seed=7, max_tokens=2, stop_token_ids=[3], ignore_eos=True
        )
        priority = inference_pb2.PRIORITY_CRITICAL
        request = inference_pb2.GenerateRequest(
            text="x", sampling_params=params, priority=priority, tenant="gold", timeout_ms=5000
        )
        await place.stub.Generate(request)
        plain, full = place.replicas[0].submits
        found = plain.sampling_params
        assert (found.temperature, found.top_k, found.top_p, found.max_tokens) == (1.0, 0, 1.0, 16)
        assert (plain.priority, plain.tenant) == (2, "")
        wanted = engine_pb2.EngineSamplingParams(
            temperature=0.7, top_k=5, top_p=0.9, seed=7, max_tokens=2, stop_token_ids=[3], ignore_eos=True
        )
        assert full.sampling_params == wanted, "0.7 and not 0.699999988"
        assert (full.priority, full.tenant) == (0, "gold")
        assert 0 < full.time_left_ms <= 5000


@on_each_loop
async def test_the_seed_of_an_unseeded_request_follows_from_its_id():
    async with site(await FakeReplica.start()) as place:
        for request_id in ("a", "a", "b"):
            await place.stub.Generate(inference_pb2.GenerateRequest(text="x", request_id=request_id))
        first, again, other = (submit.sampling_params.seed for submit in place.replicas[0].submits)
        assert first == again != other


@on_each_loop
async def test_the_request_id_is_in_the_headers_at_once():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        call = place.stub.GenerateStream(request(request_id="mine"))
        assert dict(await call.initial_metadata())["x-request-id"] == "mine"
        replica.resume()
        await collected(call)


@on_each_loop
async def test_tokenize_and_detokenize_are_inverse():
    async with site(await FakeReplica.start()) as place:
        tokens = await place.stub.Tokenize(inference_pb2.TokenizeRequest(model="fake", text="héllo"))
        assert list(tokens.token_ids) == list("héllo".encode())
        answer = await place.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
        assert answer.text == "héllo"


@on_each_loop
async def test_long_texts_are_tokenized_on_a_thread():
    async with site(await FakeReplica.start()) as place:
        text = "x" * 50_000
        assert len((await place.stub.Tokenize(inference_pb2.TokenizeRequest(text=text))).token_ids) == 50_000
        answer = await place.stub.Generate(request(text, max_tokens=1))
        assert answer.usage.prompt_tokens == 50_000


@on_each_loop
async def test_models_and_load_are_reported():
    async with site(await FakeReplica.start("r0"), await FakeReplica.start("r1")) as place:
        (model,) = (await place.stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert (model.name, model.num_replicas, model.max_model_len, model.vocab_size) == ("fake", 2, 100_000, 256)
        assert (model.tensor_parallel_size, model.row_invariant) == (2, True)
        assert (model.quantization, model.weight_bytes) == ("GGUF Q4_1", 3 << 20)
        load = await place.stub.GetLoad(inference_pb2.GetLoadRequest())
        assert (load.num_queued, load.num_open) == (0, 0)
        assert sorted(replica.replica_id for replica in load.replicas) == ["r0", "r1"]
        assert load.replicas[0].num_total_blocks == 9


@on_each_loop
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


# --- slow readers ---


@on_a_loop
async def test_a_slow_reader_holds_up_nobody_and_loses_nothing():
    replica = await FakeReplica.start(step_s=0)
    async with site(replica) as place:
        narrow = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 0)]
        channel = grpc.aio.insecure_channel(place.router.address, options=narrow)
        slow = inference_pb2_grpc.InferenceStub(channel).GenerateStream(request("slow", max_tokens=2_000))
        await replica.until(lambda: replica.running)
        assert (await place.stub.Generate(request("quick", max_tokens=50))).usage.completion_tokens == 50
        await replica.until(lambda: not replica.running)
        chunks = await collected(slow)
        assert len(chunks) < 2_000, "what was not read yet was merged"
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected("slow", 1, 2_000)[0]
        await channel.close()


# --- stopping ---


@on_each_loop
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


@on_each_loop
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

"""What a router refuses over gRPC: code, field and message for each kind of bad input, and the server goes on."""

import asyncio
from collections import Counter

import grpc

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.v1 import engine_pb2, inference_pb2
from tests.fakes import FakeReplica
from tests.loops import on_a_loop, on_each_loop
from tests.router.site import collected, eventually, num_open_is, refusal, request, site, taken_apart


def params(**fields) -> dict:
    return {"sampling_params": inference_pb2.SamplingParams(**fields)}


BAD_REQUESTS = {
    "empty text": ({"text": ""}, "text", "must not be empty"),
    "no token ids": ({"token_ids": inference_pb2.TokenIds()}, "token_ids", "must not be empty"),
    "no prompt": ({}, "prompt", "one of text, token_ids and chat"),
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
    "empty stop string": (params(stop=["a", ""]), "sampling_params.stop", "must not be empty"),
    "too many stop strings": (params(stop=["x"] * 65), "sampling_params.stop", "at most 64"),
    "long stop string": (params(stop=["x" * 1025]), "sampling_params.stop", "at most 1024"),
    "stop token out of range": (params(stop_token_ids=[999]), "sampling_params.stop_token_ids", "vocabulary"),
    "unknown priority": ({"priority": 99}, "priority", "holdfast.v1.Priority"),
    "timeout 0": ({"timeout_ms": 0}, "timeout_ms", "at most 3600 seconds"),
    "timeout too long": ({"timeout_ms": 2**32 - 1}, "timeout_ms", "at most 3600 seconds"),
    "long request id": ({"request_id": "x" * 129}, "request_id", "at most 128"),
    "request id with a newline": ({"request_id": "a\nb"}, "request_id", "printable ASCII"),
    "long tenant": ({"text": "x", "tenant": "x" * 129}, "tenant", "at most 128"),
}


@on_each_loop
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


@on_each_loop
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


@on_each_loop
async def test_a_model_must_be_named_where_there_are_several():
    async with site(await FakeReplica.start("r0", "one"), await FakeReplica.start("r1", "two")) as place:
        refused = await refusal(place.stub.Generate(request()))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "model")
        assert (await place.stub.Generate(request(model="two"))).model == "two"


@on_each_loop
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


@on_each_loop
async def test_unknown_fields_are_ignored():
    async with site(await FakeReplica.start()) as place:
        raw = place.channel.unary_unary("/holdfast.v1.Inference/Generate")
        data = request("x", max_tokens=2).SerializeToString() + b"\xfa\x3f\x03abc"
        answer = inference_pb2.GenerateResponse.FromString(await raw(data))
        assert answer.usage.completion_tokens == 2


@on_each_loop
async def test_a_sequence_that_no_cache_holds_is_refused():
    replica = await FakeReplica.start()
    replica.num_blocks = 4
    async with site(replica) as place:
        refused = await refusal(place.stub.Generate(request("x" * 64)))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "text")
        assert "KV cache holds 64 tokens" in refused.message


@on_each_loop
async def test_detokenizing_checks_its_tokens():
    async with site(await FakeReplica.start()) as place:
        refused = await refusal(place.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[256])))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "token_ids")
        many = inference_pb2.DetokenizeRequest(token_ids=[1] * 100_001)
        assert "at most 100000" in (await refusal(place.stub.Detokenize(many))).message


@on_each_loop
async def test_a_replicas_refusals_reach_the_client():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        replica.refusal = engine_pb2.Rejection(field="prompt", message="needs 9 blocks, there are 8")
        refused = await refusal(place.stub.Generate(request()))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "prompt")
        assert refused.message == "prompt: needs 9 blocks, there are 8"


@on_each_loop
async def test_what_a_full_replica_refuses_waits_in_the_router():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        replica.refusal = engine_pb2.Rejection(message="1024 requests wait already", retry_after_ms=50)
        call = place.stub.Generate(request())
        await replica.until(lambda: replica.refusal.attempt > 1)
        replica.refusal = None
        assert (await call).usage.completion_tokens == 8


@on_each_loop
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


@on_a_loop
async def test_what_would_begin_too_late_is_refused_while_it_waits():
    """The timer of the router's loop ends the wait, long before the request's own time is up."""
    replica = await FakeReplica.start()
    replica.pause()
    config = RouterConfig(max_waiting_per_replica=1, max_ttft_s=0.1)
    async with site(replica, config=config) as place:
        running = place.stub.Generate(request(), timeout=60)
        await replica.until(lambda: replica.running)
        refused = await refusal(place.stub.Generate(request(), timeout=60))
        assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert refused.retry_after_s > 0
        assert len(replica.submits) == 1
        replica.resume()
        await running


@on_a_loop
async def test_a_burst_of_1200_calls_is_answered_call_by_call():
    """More than gRPC lets wait of itself: what it cancels was told neither by us nor by the client."""
    replica = await FakeReplica.start()
    replica.pause()
    config, limits = RouterConfig(max_waiting_per_replica=10), LimitsConfig(max_queued=20)
    async with site(replica, config=config, limits=limits) as place:
        calls = [place.stub.Generate(request(max_tokens=1), timeout=60) for _ in range(1200)]
        outcomes = [asyncio.ensure_future(outcome(call)) for call in calls]
        await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
        await eventually(lambda: num_are_done(outcomes, 1170), timeout_s=50)
        replica.resume()
        said = Counter(await asyncio.gather(*outcomes))
        assert said == {"answered": 30, ("RESOURCE_EXHAUSTED", "QUEUE_FULL", True): 1170}


async def outcome(call) -> object:
    """That it was answered, or the code, the reason, and whether it is said when to come again."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        refused = taken_apart(error)
        return refused.code, refused.reason, refused.retry_after_s is not None
    return "answered"


async def num_are_done(tasks, number: int) -> bool:
    return sum(task.done() for task in tasks) >= number


@on_a_loop
async def test_of_two_calls_with_one_id_the_newer_wins():
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        first = place.stub.Generate(request(request_id="same"))
        await replica.until(lambda: replica.running)
        second = place.stub.Generate(request(request_id="same"))
        refused = await refusal(first)
        assert (refused.code, refused.reason) == ("ABORTED", "SUPERSEDED")
        replica.resume()
        assert (await second).usage.completion_tokens == 8

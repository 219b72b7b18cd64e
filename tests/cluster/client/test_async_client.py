import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.router.generation import OutputDelta
from holdfast.router.wire.statuses import call_status
from holdfast.v1 import inference_pb2, inference_pb2_grpc
from holdfast.worker.errors import (
    DeadlineExceededError,
    HoldfastError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    ReplicaError,
    UnknownModelError,
)
from holdfast.worker.request import FinishReason, Priority
from holdfast.worker.sampling_params import SamplingParams
from tests import loops

CHUNKS = [
    inference_pb2.GenerateStreamResponse(request_id="r", token_ids=[1, 2], text="ab"),
    inference_pb2.GenerateStreamResponse(
        request_id="r",
        first_token_index=2,
        token_ids=[3],
        text="c",
        finish_reason=inference_pb2.FINISH_REASON_LENGTH,
    ),
]


class FakeRouter(inference_pb2_grpc.InferenceServicer):
    """Keeps the request, answers with `CHUNKS`, and fails after them if told how."""

    def __init__(self, error: HoldfastError | None = None) -> None:
        self.error = error
        self.request = inference_pb2.GenerateRequest()
        self.cancelled = asyncio.Event()

    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        self.request = request
        try:
            for chunk in CHUNKS:
                yield chunk
            if self.error is not None:
                status = call_status(self.error)
                await context.abort(status.code, status.message, status.trailing_metadata)
            if request.text == "endless":
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


async def _ask(router: FakeRouter, **options: object) -> list[OutputDelta]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    chunks = []
    try:
        async with AsyncClient(f"127.0.0.1:{port}", reconnect_s=0) as client:
            async for chunk in client.stream(**{"prompt": "hello", **options}):
                chunks.append(chunk)
                if options.get("prompt") == "endless":
                    break
            if options.get("prompt") == "endless":
                await asyncio.wait_for(router.cancelled.wait(), 5)
    finally:
        await server.stop(None)
    return chunks


def ask(router: FakeRouter, **options: object) -> list[OutputDelta]:
    return loops.run(_ask(router, **options))


def test_chunks_come_as_plain_data():
    first, last = ask(FakeRouter())
    assert (first.first_token_index, first.token_ids, first.text, first.finish_reason) == (0, (1, 2), "ab", None)
    assert (last.first_token_index, last.token_ids, last.finish_reason) == (2, (3,), FinishReason.LENGTH)


def test_everything_that_is_asked_reaches_the_router():
    router = FakeRouter()
    params = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.5, seed=0, max_tokens=7, stop=["x"], stop_token_ids=[9], ignore_eos=True
    )
    ask(
        router,
        params=params,
        model="m",
        request_id="id",
        priority=Priority.LOW,
        timeout_s=1.5,
        tenant="gold",
        cache_salt="s",
        cache_ttl_s=60,
    )
    request, sampling = router.request, router.request.sampling_params
    assert (request.text, request.model, request.request_id, request.timeout_ms) == ("hello", "m", "id", 1500)
    assert (request.priority, request.tenant, request.cache_salt) == (inference_pb2.PRIORITY_LOW, "gold", "s")
    assert request.cache_ttl_s == 60
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.5, 3, 0.5, 7)
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (["x"], [9], True)
    assert sampling.HasField("seed")
    assert sampling.seed == 0


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_timeout_that_is_over_before_it_begins_is_refused_by_name(timeout_s):
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        ask(FakeRouter(), timeout_s=timeout_s)


def test_what_is_not_asked_is_not_sent():
    router = FakeRouter()
    ask(router, prompt=[4, 5], params=SamplingParams(max_tokens=None))
    assert router.request.token_ids.ids == [4, 5]
    assert not router.request.HasField("timeout_ms")
    assert not router.request.sampling_params.HasField("seed")
    assert not router.request.sampling_params.HasField("max_tokens")


SENT = [
    InvalidRequestError("text", "", "must not be empty"),
    UnknownModelError("m", ("demo",)),
    QueueFullError("full", 2.5),
    ReplicaError("lost", 0.25),
    DeadlineExceededError("late"),
    InternalError("a bug"),
]


@pytest.mark.parametrize("sent", SENT, ids=lambda sent: type(sent).__name__)
def test_a_status_comes_back_as_the_error_that_it_was(sent):
    with pytest.raises(HoldfastError) as raised:
        ask(FakeRouter(error=sent))
    assert type(raised.value) is type(sent)
    assert str(raised.value) == str(sent)
    assert raised.value.retry_after_s == sent.retry_after_s


def test_leaving_the_iteration_cancels_the_request():
    assert len(ask(FakeRouter(), prompt="endless")) == 1


def test_no_server_is_a_replica_error():
    async def ask_nobody() -> None:
        async with AsyncClient("127.0.0.1:1") as client:
            await client.list_models()

    with pytest.raises(ReplicaError):
        loops.run(ask_nobody())

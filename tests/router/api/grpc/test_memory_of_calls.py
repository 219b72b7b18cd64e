"""What a call held is freed once it has ended, refused or left by its client, without the garbage collector."""

import asyncio

import grpc
import pytest

from holdfast.v1 import inference_pb2
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.site import collected, request, site
from tests.router.traced_memory import check_freed, traced

__all__ = ["traced"]  # a fixture

MESSAGE: bytes = b"x" * 400_000
REFUSED_BY_ITS_BYTES = inference_pb2.GenerateRequest(text="x" * 10**6)
REFUSED_BY_ITS_TOKENS = inference_pb2.GenerateRequest(text=MESSAGE.decode())
PAST_ITS_DEADLINE = request(text="x" * 90_000, max_tokens=5000, timeout_ms=50)


async def refused(place, method: str, message: object) -> None:
    call = getattr(place.stub, method)(message)
    with pytest.raises(grpc.aio.AioRpcError):
        await (call if method == "Generate" else collected(call))


async def left(place, method: str, message: object) -> None:
    call = place.stub.GenerateStream(request(text="x" * 50_000))
    await call.read()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.read()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("end", "method", "message"),
    [
        (refused, "Generate", REFUSED_BY_ITS_BYTES),
        (refused, "Generate", REFUSED_BY_ITS_TOKENS),
        (refused, "GenerateStream", REFUSED_BY_ITS_BYTES),
        (refused, "GenerateStream", REFUSED_BY_ITS_TOKENS),
        (refused, "Generate", PAST_ITS_DEADLINE),
        (refused, "GenerateStream", PAST_ITS_DEADLINE),
        (left, "GenerateStream", None),
    ],
)
@on_a_loop
async def test_what_a_call_held_is_freed(end, method, message):
    async with site(await FakeReplica.start()) as place:
        await check_freed(lambda: end(place, method, message), len(MESSAGE))

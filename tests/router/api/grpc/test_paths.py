"""A request whose path is no text does not end a router's gRPC server, nor any call on it."""

import grpc
import pytest

from holdfast.v1 import inference_pb2_grpc
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.grpc.paths import PATHS, send_path
from tests.router.site import request, site


@pytest.mark.parametrize("path", PATHS)
@on_a_loop
async def test_a_router_serves_on(path):
    replica = await FakeReplica.start()
    async with site(replica) as place, grpc.aio.insecure_channel(place.router.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        running = stub.GenerateStream(request(max_tokens=40))
        assert await running.read() is not grpc.aio.EOF
        await send_path(place.router.address, path)
        for _ in range(3):
            assert (await stub.Generate(request(max_tokens=2))).completions
        while await running.read() is not grpc.aio.EOF:
            pass
        assert await running.code() is grpc.StatusCode.OK

"""What gRPC's transport takes for the loss of a router: against a server of gRPC's own that ends in every way."""

import subprocess
import sys

import grpc
import pytest

from holdfast.cluster.client.transport import CallFailed, GrpcTransport
from holdfast.v1 import inference_pb2
from tests.loops import on_a_loop

SERVER = """
import asyncio, grpc, os, signal
from holdfast.v1 import inference_pb2, inference_pb2_grpc

class Servicer(inference_pb2_grpc.InferenceServicer):
    async def Detokenize(self, request, context):
        if request.model == "stops in order":
            await server.stop(0)
        elif request.model:
            os.kill(os.getpid(), signal.Signals[request.model])
            await asyncio.sleep(60)
        return inference_pb2.DetokenizeResponse(text="fine")

async def main():
    global server
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("end", "is_lost"),
    [("SIGKILL", True), ("stops in order", False), pytest.param("SIGSTOP", False, marks=pytest.mark.slow)],
)
@on_a_loop
async def test_a_router_is_lost_if_its_connection_breaks_and_not_if_it_says_so_or_is_silent(end, is_lost):
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    transport, address = GrpcTransport(), f"127.0.0.1:{int(server.stdout.readline())}"

    async def ask(model: str) -> CallFailed | str:
        message = inference_pb2.DetokenizeRequest(model=model)
        try:
            (answer,) = [answer async for answer in transport.call(address, "Detokenize", message)]
            return str(answer.text)
        except CallFailed as failed:
            return failed

    try:
        assert await ask("") == "fine"
        failed = await ask(end)
        assert isinstance(failed, CallFailed)
        assert failed.is_router_lost is is_lost, failed
        server.kill()
        server.wait()
        channel = transport._channel(address)
        while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)  # what is sent before the channel knows breaks as well
        gone = await ask("")
        assert isinstance(gone, CallFailed)
        assert (gone.status.code, gone.is_router_lost) == (grpc.StatusCode.UNAVAILABLE, False), gone
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        await transport.close()

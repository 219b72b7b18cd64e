"""What gRPC's transport takes for the loss of a router: against a server of gRPC's own that ends in every way."""

import asyncio
import subprocess
import sys

import grpc
import pytest

from holdfast.cluster.client.transport import CallFailed, GrpcTransport, _is_router_lost
from holdfast.router.wire.statuses import CallStatus
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
    ("said", "is_lost"),
    [
        ("Stream removed (Socket closed)", True),
        ("Stream removed (sendmsg: Broken pipe (32))", False),
        ("Stream removed (recvmsg:Connection reset by peer (104))", False),
        ("Stream removed (Transport closed (Socket closed))", False),
        ("failed to connect to all addresses; last error: UNKNOWN: Connection refused", False),
        ("errors resolving nohost:5: [field:hostname lookup error:address lookup failed for nohost:5]", False),
        ("DNS resolution failed for nohost:5: C-ares status is not ARES_SUCCESS", False),
    ],
)
def test_a_call_that_was_written_to_a_broken_connection_was_read_by_nobody(said, is_lost):
    """As gRPC words it, each seen with a process that was killed before the call, or while it read the call."""
    status = CallStatus(code=grpc.StatusCode.UNAVAILABLE, message=said, trailing_metadata=())
    assert _is_router_lost(status) is is_lost


@pytest.mark.parametrize("address", ["http://127.0.0.1:5", "[::2", "no such host:5"])
@on_a_loop
async def test_an_address_that_names_nothing_costs_no_router(address):
    transport = GrpcTransport()
    with pytest.raises(CallFailed) as failed:
        async for _ in transport.call(address, "Detokenize", inference_pb2.DetokenizeRequest()):
            pass
    assert not failed.value.is_router_lost, failed.value
    await transport.close()


@pytest.mark.slow  # processes one after the other
@on_a_loop
async def test_calls_that_are_sent_after_the_end_of_their_router_cost_it_nothing():
    """The channel does not know yet that its connection has ended."""
    for _ in range(10):
        server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
        transport, address = GrpcTransport(), f"127.0.0.1:{int(server.stdout.readline())}"
        assert await answered(transport, address, "") == "fine"
        server.kill()
        server.wait()
        for failed in await asyncio.gather(*(answered(transport, address, "") for _ in range(4))):
            assert isinstance(failed, CallFailed)
            assert not failed.is_router_lost, failed
        await transport.close()
        server.stdout.close()


async def answered(transport: GrpcTransport, address: str, model: str) -> CallFailed | str:
    message = inference_pb2.DetokenizeRequest(model=model)
    try:
        (answer,) = [answer async for answer in transport.call(address, "Detokenize", message)]
        return str(answer.text)
    except CallFailed as failed:
        return failed


@pytest.mark.parametrize(
    ("end", "is_lost"),
    [("SIGKILL", True), ("stops in order", False), pytest.param("SIGSTOP", False, marks=pytest.mark.slow)],
)
@on_a_loop
async def test_a_router_is_lost_if_its_connection_breaks_and_not_if_it_says_so_or_is_silent(end, is_lost):
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    transport, address = GrpcTransport(), f"127.0.0.1:{int(server.stdout.readline())}"
    try:
        assert await answered(transport, address, "") == "fine"
        failed = await answered(transport, address, end)
        assert isinstance(failed, CallFailed)
        assert failed.is_router_lost is is_lost, failed
        server.kill()
        server.wait()
        channel = transport._channel(address)
        while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)  # what is sent before the channel knows breaks as well
        gone = await answered(transport, address, "")
        assert isinstance(gone, CallFailed)
        assert (gone.status.code, gone.is_router_lost) == (grpc.StatusCode.UNAVAILABLE, False), gone
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        await transport.close()

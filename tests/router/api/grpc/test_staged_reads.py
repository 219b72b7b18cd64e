"""Messages of gRPC calls that have arrived together are copied one after the other, each in a turn of its own."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc

from holdfast.router.api.grpc.decoding import TURN_BYTES, StagedReads
from tests.loops import on_a_loop, on_each_loop

LARGE = bytes(TURN_BYTES)
SMALL = b"small"


class Turns:
    """Counts turns of the loop, and in which of them each message was copied."""

    def __init__(self) -> None:
        self.number = 0
        self.copied: list[tuple[int, int]] = []
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self.number += 1
        self._handle = self._loop.call_soon(self._turn)

    def stop(self) -> None:
        self._handle.cancel()

    def read(self, arrived: "asyncio.Future[None]", message: bytes) -> Coroutine[Any, Any, bytes]:
        """As `read` of gRPC's context: it waits once, and copies."""

        async def read() -> bytes:
            await arrived
            self.copied.append((self.number, len(message)))
            return message

        return read()

    @property
    def most_bytes(self) -> int:
        return max(sum(size for turn, size in self.copied if turn == number) for number, _ in self.copied)


@on_each_loop
async def test_large_messages_that_come_together_are_copied_in_turns_of_their_own_and_in_order():
    reads, turns = StagedReads(), Turns()
    arrived = asyncio.get_running_loop().create_future()
    sizes = [len(LARGE), 5, len(LARGE), len(LARGE), 5, 5, 5, len(LARGE)]
    calls = [asyncio.ensure_future(reads.read(turns.read(arrived, bytes(size)))) for size in sizes]
    await asyncio.sleep(0)
    arrived.set_result(None)
    assert [len(message) for message in await asyncio.gather(*calls) if message is not None] == sizes
    turns.stop()
    assert turns.most_bytes < len(LARGE) + 100
    assert [size for _, size in turns.copied] == sizes


@on_each_loop
async def test_small_messages_are_copied_in_the_turn_that_they_come_in():
    reads, turns = StagedReads(), Turns()
    arrived = asyncio.get_running_loop().create_future()
    calls = [asyncio.ensure_future(reads.read(turns.read(arrived, SMALL))) for _ in range(100)]
    await asyncio.sleep(0)
    arrived.set_result(None)
    await asyncio.gather(*calls)
    turns.stop()
    assert len({turn for turn, _ in turns.copied}) == 1


@on_each_loop
async def test_a_call_that_is_cancelled_while_its_message_waits_is_passed_over_and_its_message_is_taken_from_grpc():
    reads, turns = StagedReads(), Turns()
    arrived = asyncio.get_running_loop().create_future()
    calls = [asyncio.ensure_future(reads.read(turns.read(arrived, LARGE))) for _ in range(3)]
    await asyncio.sleep(0)
    arrived.set_result(None)
    while not turns.copied:
        await asyncio.sleep(0)
    calls[1].cancel()
    done, cancelled, last = await asyncio.gather(*calls, return_exceptions=True)
    turns.stop()
    assert (done, last) == (LARGE, LARGE)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert len(turns.copied) == 3


@on_each_loop
async def test_a_call_that_is_cancelled_before_its_message_comes_ends_and_holds_up_nobody():
    reads, turns = StagedReads(), Turns()
    loop = asyncio.get_running_loop()
    never, arrived = loop.create_future(), loop.create_future()
    call = asyncio.ensure_future(reads.read(turns.read(never, LARGE)))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    loop.call_soon(arrived.set_result, None)
    assert await reads.read(turns.read(arrived, SMALL)) == SMALL
    turns.stop()


@on_a_loop
async def test_eight_large_messages_of_a_real_server_are_never_copied_in_one_turn():
    reads, size = StagedReads(), 4 * TURN_BYTES
    received: list[int] = []

    async def call(_: object, context: Any) -> bytes:
        message = await reads.read(context.read())
        received.append(0 if message is None else len(message))
        end = await reads.read(context.read())
        return b"" if end is None else b"more"

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    handlers = {"Call": grpc.stream_unary_rpc_method_handler(call)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x.Y", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        unary = channel.unary_unary("/x.Y/Call")
        assert await asyncio.gather(*(unary(bytes(size)) for _ in range(8))) == [b""] * 8
    await server.stop(None)
    assert received == [size] * 8
    assert size <= reads.most_bytes < size + TURN_BYTES

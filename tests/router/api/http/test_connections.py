"""Connections that do nothing and clients that read slowly, beside others: buffers are bounded, and nobody waits."""

import asyncio
import json
import re
import socket

import pytest

from holdfast.router.config import LimitsConfig
from holdfast.v1 import engine_pb2
from tests.fakes import FakeReplica
from tests.loops import on_a_loop
from tests.router.api.http.test_openai_sdk import HELLO, RENDERED, openai_site, text_of

NUM_IDLE, NUM_SLOW = 500, 100
NUM_SILENT, NUM_SLOTS = 300, 60
LONG_NAME = "a model of a long name " * 70
"""Events of its streams have two kilobytes, so that few fill the buffers of a connection."""


async def connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """With buffers on this side that are small."""
    host, port = address.split(":")
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    link.setblocking(False)
    await asyncio.get_running_loop().sock_connect(link, (host, int(port)))
    return await asyncio.open_connection(sock=link, limit=2**16)


async def reading_slowly(address: str, num_tokens: int, **fields) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A long stream of which next to nothing is read."""
    reader, writer = await connected(address)
    asked = {"messages": HELLO, "max_tokens": num_tokens, "stream": True, "seed": 5, **fields}
    body = json.dumps(asked).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    return reader, writer


@on_a_loop
async def test_idle_and_slow_connections_hold_nobody_up():
    replica = await FakeReplica.start(step_s=0.02)
    async with openai_site(replica) as (place, client):
        address = place.router.http_address
        open_ones = [await connected(address) for _ in range(NUM_IDLE)]
        open_ones += [await reading_slowly(address, 60_000) for _ in range(NUM_SLOW)]
        await replica.until(lambda: len(replica.running) == NUM_SLOW)
        began = replica.num_steps
        answer = await client.chat.completions.create(model="fake", messages=HELLO, seed=9, max_tokens=20)
        stream = await client.chat.completions.create(model="fake", messages=HELLO, seed=8, max_tokens=20, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        num_steps = replica.num_steps - began
        assert (answer.choices[0].message.content, text) == (text_of(RENDERED, 9, 20), text_of(RENDERED, 8, 20))
        assert 40 <= num_steps < 4 * 40  # each took its own steps, and not many passed on the way
        assert len(replica.running) == NUM_SLOW
        for _, writer in open_ones:
            writer.transport.abort()
        await place.until_idle()


@on_a_loop
@pytest.mark.parametrize("options", [{"continuous_usage_stats": True}, {}], ids=["by ASGI", "past ASGI"])
async def test_what_a_slow_reader_has_not_read_is_merged(options):
    """The server writes no more than the sockets take, and its own small buffer; the rest waits as one event."""
    num_tokens = 5_000
    replica = await FakeReplica.start(model=LONG_NAME, step_s=0.0)
    async with openai_site(replica, limits=LimitsConfig(max_unread_tokens=None)) as (place, _):
        reader, writer = await reading_slowly(place.router.http_address, num_tokens, stream_options=options)
        await replica.until(lambda: replica.num_tokens == 1)
        while place.router.num_open:  # until the router has all tokens
            await asyncio.sleep(0.01)
        answer = b""
        while b"data: [DONE]" not in answer[-100:]:
            answer += await reader.read(2**20)
        writer.close()
    pieces = [json.loads(piece) for piece in re.findall(rb'"content":("[^"]*")', answer)]
    assert "".join(pieces) == text_of(RENDERED, 5, num_tokens)
    assert len(pieces) < num_tokens * 3 / 4


class FewSlots(FakeReplica):
    """Runs the first `NUM_SLOTS` of the requests that it has; the others wait."""

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if running := list(self.running)[:NUM_SLOTS]:
                deltas = [self._advance(attempt) for attempt in running]
                self.say(engine_pb2.StepUpdate(deltas=deltas, load=self._load()))
                self._tell()


@pytest.mark.slow
@on_a_loop
async def test_three_hundred_clients_that_read_nothing_leave_the_slots_to_those_who_read():
    """All streams are open, and none has ended, when others are answered."""
    replica = await FewSlots.start(model=LONG_NAME, step_s=0.002)
    limits = LimitsConfig(max_unread_tokens=16)
    async with openai_site(replica, limits=limits) as (place, client):
        silent = [await reading_slowly(place.router.http_address, 60_000) for _ in range(NUM_SILENT)]
        await replica.until(lambda: len(replica.submits) >= NUM_SLOTS)
        async with asyncio.timeout(60):
            for _ in range(2):
                answer = await client.chat.completions.create(model=LONG_NAME, messages=HELLO, seed=9, max_tokens=20)
                assert answer.choices[0].message.content == text_of(RENDERED, 9, 20)
        assert place.router.num_open == NUM_SILENT, "they hold their connections, and no slots"
        for _, writer in silent:
            writer.transport.abort()
        await place.until_idle()

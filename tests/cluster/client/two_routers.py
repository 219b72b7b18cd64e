"""Two routers behind proxies that break connections off where they are told, and the stock clients that ask them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx2
import openai

from benchmarks.static_directory import StaticDirectory
from holdfast import HoldingTransport
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.server.router import Router
from holdfast.router.wire.resume_codec import MARK
from tests.fakes import FakeReplica, byte_tokenizer
from tests.router.api.http.test_openai_sdk import TEMPLATE
from tests.router.site import CALM, eventually

NUM_TOKENS = 7


@dataclass
class Cutter:
    """A TCP proxy that breaks connections off where it is told: after so many marks, and some bytes."""

    target: str
    cuts: list[tuple[int, int]] = field(default_factory=list)
    """Of the next connections that carry a stream, one each."""
    num_cut: int = 0
    refuses: bool = False

    async def start(self) -> "Cutter":
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._tasks = set()
        return self

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.transport.abort()
            return
        host, port = self.target.split(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        both = writer, far_writer
        for work in (self._up(reader, far_writer), self._down(far_reader, writer, both)):
            self._tasks.add(asyncio.create_task(work))

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(2**16):
                writer.write(data)
        writer.close()

    async def _down(self, reader, writer, both) -> None:
        seen, sent, cut = b"", 0, None
        while data := await reader.read(2**16):
            seen += data
            if cut is None and self.cuts and b"text/event-stream" in seen:
                cut = self.cuts.pop(0)
            if cut is not None and (at := place_of(seen, *cut)) is not None:
                writer.write(seen[sent:at])
                await writer.drain()
                self.num_cut += 1
                await asyncio.sleep(0.005)  # what was written arrives before the end
                for one in both:
                    one.transport.abort()
                return
            writer.write(data)
            sent = len(seen)
        writer.close()


def place_of(seen: bytes, num_marks: int, num_bytes: int) -> int | None:
    """Where a stream is cut; None if it has not come so far."""
    at = 0
    for _ in range(num_marks):
        at = seen.find(MARK, at)
        if at < 0:
            return None
        at = seen.find(b"\n\n", at) + 2
        if at == 1:
            return None
    return at + num_bytes if len(seen) >= at + num_bytes else None


@dataclass
class Two:
    """Two routers, each behind a cutter and with a replica of its own: all replicas answer the same."""

    replicas: list[FakeReplica]
    routers: list[Router]
    cutters: list[Cutter]

    @property
    def addresses(self) -> list[str]:
        return [cutter.address for cutter in self.cutters]

    def cut(self, *cuts: tuple[int, int]) -> None:
        """The streams that come next, whichever router they come to."""
        shared = list(cuts)
        for cutter in self.cutters:
            cutter.cuts = shared

    @property
    def num_cut(self) -> int:
        return sum(cutter.num_cut for cutter in self.cutters)

    def transport(self, **options) -> HoldingTransport:
        return HoldingTransport(self.addresses, draw=lambda: 0.0, verify=False, **options)


@asynccontextmanager
async def two_routers(step_s: float = 0.002) -> AsyncIterator[Two]:
    replicas = [await FakeReplica.start(name, step_s=step_s) for name in ("one", "two")]
    routers, cutters = [], []
    for replica in replicas:
        router = await Router.start(
            RouterConfig(max_reconnect_s=0.1),
            LimitsConfig(),
            StaticDirectory([replica.endpoint]),
            load_tokenizer=lambda path: byte_tokenizer(path, TEMPLATE),
            http_port=0,
            overload=CALM,
        )
        routers.append(router)
        cutters.append(await Cutter(router.http_address).start())
    await eventually(lambda: _are_up(routers))
    try:
        yield Two(replicas, routers, cutters)
        await eventually(lambda: is_idle(routers))
    finally:
        for cutter in cutters:
            await cutter.stop()
        for router in routers:
            await router.stop()
        for replica in replicas:
            await replica.kill()


async def _are_up(routers: list[Router]) -> bool:
    async with httpx2.AsyncClient(verify=False) as client:
        return all([(await client.get(f"http://{one.http_address}/health")).is_success for one in routers])


async def is_idle(routers: list[Router]) -> bool:
    return not any(router.num_open for router in routers)


def openai_client(place: Two, transport: HoldingTransport) -> openai.AsyncOpenAI:
    http = httpx2.AsyncClient(transport=transport)
    return openai.AsyncOpenAI(base_url=f"http://{place.addresses[0]}/v1", api_key="x", max_retries=0, http_client=http)


def come_back(place: Two) -> None:
    for cutter in place.cutters:
        cutter.refuses = False

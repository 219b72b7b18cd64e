"""A client behind a TCP proxy that forgets idle connections, resets busy ones, or goes silent: streams are whole."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import FakeReplica
from tests.loops import on_each_loop
from tests.router.site import expected, site

NUM_TOKENS = 40


class TcpProxy:
    """Passes bytes on both ways, until one of its faults strikes."""

    def __init__(self, upstream: str) -> None:
        self._host, _, self._port = upstream.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._passing: set[asyncio.Task[None]] = set()
        self.num_connections = 0
        self.reset_after_bytes: int | None = None
        """Of what comes from upstream, once."""
        self.is_silent = False
        """The connections that there are pass nothing on, and are not closed either."""

    @asynccontextmanager
    async def listening(self):
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            self.reset()
            for passing in self._passing:
                passing.cancel()
            await asyncio.gather(*self._passing, return_exceptions=True)

    def reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        up_reader, up_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, up_writer]
        number = self.num_connections
        for source, sink, is_down in ((reader, up_writer, False), (up_reader, writer, True)):
            self._passing.add(asyncio.ensure_future(self._pass_on(source, sink, number, is_down=is_down)))

    async def _pass_on(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, number: int, *, is_down: bool
    ) -> None:
        with suppress(ConnectionError, asyncio.CancelledError):
            while data := await source.read(65536):
                if self.is_silent and number == 1:
                    continue
                sink.write(data)
                if is_down and self.reset_after_bytes is not None:
                    self.reset_after_bytes -= len(data)
                    if self.reset_after_bytes <= 0:
                        self.reset_after_bytes = None
                        self.reset()
        sink.close()


async def ask(client: AsyncClient) -> str:
    return (await client.generate("hello", SamplingParams(max_tokens=NUM_TOKENS, seed=1))).completions[0].text


@on_each_loop
@pytest.mark.parametrize("fault", ["reset while idle", "reset in a stream", "silent while idle"])
async def test_streams_through_a_proxy_are_whole(fault):
    async with site(await FakeReplica.start()) as place:
        proxy = TcpProxy(place.router.address)
        async with proxy.listening() as address, AsyncClient(address) as client:
            wanted = expected("hello", 1, NUM_TOKENS)[1]
            assert await ask(client) == wanted
            if fault == "reset while idle":
                proxy.reset()
            elif fault == "reset in a stream":
                proxy.reset_after_bytes = 20
            else:
                proxy.is_silent = True
            assert await ask(client) == wanted
            assert proxy.num_connections == 2

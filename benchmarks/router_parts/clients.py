"""Clients of all kinds, in one process: ours and bare ones, on an event loop and blocking, as many streams at a time.

An order names the number of streams and their tokens; `count` is answered meanwhile.
"""

import argparse
import asyncio
import threading
from collections.abc import Callable
from typing import Any, Final

import grpc

from benchmarks.router_parts.load import PROMPT
from benchmarks.router_parts.orders import run, say, take_orders
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.client.blocking_client import Client
from holdfast.v1 import inference_pb2
from holdfast.worker.sampling_params import SamplingParams

METHOD: Final = "/holdfast.v1.Inference/GenerateStream"


class Counts:
    """What has arrived."""

    def __init__(self) -> None:
        self.messages = 0
        self.tokens = 0


class Streams:
    """Clients of one kind. Subclasses know how to read one stream."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.counts = Counts()
        self._running: asyncio.Future[Any] | None = None

    async def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        match order["what"]:
            case "begin":
                every = [self.repeated(order["tokens"], order["repeats"]) for _ in range(order["streams"])]
                self._running = asyncio.gather(*every)
            case "finish":
                assert self._running is not None
                await self._running
        return {"messages": self.counts.messages, "tokens": self.counts.tokens}

    async def repeated(self, num_tokens: int, repeats: int) -> None:
        for _ in range(repeats):
            await self.read(num_tokens)

    async def read(self, num_tokens: int) -> None:
        raise NotImplementedError


class OurAsync(Streams):
    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._client = AsyncClient(address)

    async def read(self, num_tokens: int) -> None:
        counts = self.counts
        async for chunk in self._client.stream(PROMPT, SamplingParams(max_tokens=num_tokens)):
            counts.messages += 1
            counts.tokens += len(chunk.token_ids)


class BareAsync(Streams):
    """Takes the bytes as they are."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._call = grpc.aio.insecure_channel(address).unary_stream(METHOD, None, None)

    async def read(self, num_tokens: int) -> None:
        counts = self.counts
        async for _ in self._call(asked(num_tokens)):  # every chunk of a bare server is a token
            counts.messages += 1
            counts.tokens += 1


class Counting(BareAsync):
    """Takes chunks apart, because one may have several tokens."""

    async def read(self, num_tokens: int) -> None:
        counts, read = self.counts, inference_pb2.GenerateStreamResponse.FromString
        async for chunk in self._call(asked(num_tokens)):
            counts.messages += 1
            counts.tokens += len(read(chunk).token_ids)


class OnThreads(Streams):
    """Each stream is read by a thread."""

    def read_all(self, num_tokens: int) -> None:
        raise NotImplementedError

    async def repeated(self, num_tokens: int, repeats: int) -> None:
        done, loop = asyncio.Event(), asyncio.get_running_loop()

        def read() -> None:
            for _ in range(repeats):
                self.read_all(num_tokens)
            loop.call_soon_threadsafe(done.set)

        threading.Thread(target=read, daemon=True).start()
        await done.wait()


class OurBlocking(OnThreads):
    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._client = Client(address)

    def read_all(self, num_tokens: int) -> None:
        counts = self.counts
        for chunk in self._client.stream(PROMPT, SamplingParams(max_tokens=num_tokens)):
            counts.messages += 1
            counts.tokens += len(chunk.token_ids)


class BareBlocking(OnThreads):
    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._call = grpc.insecure_channel(address).unary_stream(METHOD, None, None)

    def read_all(self, num_tokens: int) -> None:
        counts = self.counts
        for _ in self._call(asked(num_tokens)):
            counts.messages += 1
            counts.tokens += 1


def asked(num_tokens: int) -> bytes:
    params = inference_pb2.SamplingParams(max_tokens=num_tokens)
    return inference_pb2.GenerateRequest(text=PROMPT, sampling_params=params).SerializeToString()


KINDS: Final[dict[str, Callable[[str], Streams]]] = {
    "our-async": OurAsync,
    "bare-async": BareAsync,
    "counting": Counting,
    "our-blocking": OurBlocking,
    "bare-blocking": BareBlocking,
}


async def main(kind: str, address: str) -> None:
    streams = KINDS[kind](address)
    say()
    await take_orders(streams.carry_out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("address")
    arguments = parser.parse_args()
    run(main(arguments.kind, arguments.address))

"""Bare server: grpc.aio and nothing else. It sends prepared bytes to every stream, one chunk a step."""

import argparse
import asyncio
import sys

import grpc

from benchmarks.router_parts.load import prepared
from benchmarks.router_parts.orders import run, say, until_the_end
from holdfast.v1 import inference_pb2


class Steps:
    """Counts steps at a steady pace, and wakes who waits for the next. With a pace of 0 nobody waits."""

    def __init__(self, per_s: float) -> None:
        self._is_paced = per_s > 0
        self.num = 0 if self._is_paced else sys.maxsize
        if not self._is_paced:
            return
        self._loop = asyncio.get_running_loop()
        self._gap_s = 1 / per_s
        self._next_s = self._loop.time()
        self._next: asyncio.Future[None] = self._loop.create_future()
        self._step()

    @property
    def began(self) -> int:
        """The step that a stream which begins now begins with."""
        return self.num if self._is_paced else 0

    async def after(self, num: int) -> None:
        while self.num <= num:
            await self._next

    def _step(self) -> None:
        self.num += 1
        step, self._next = self._next, self._loop.create_future()
        step.set_result(None)
        self._next_s = max(self._next_s + self._gap_s, self._loop.time())
        self._loop.call_at(self._next_s, self._step)


class Streams:
    """The one method. It answers each request with as many chunks as it asks for tokens."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    async def generate_stream(self, request: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        asked = inference_pb2.GenerateRequest.FromString(request)
        chunks = prepared(asked.sampling_params.max_tokens)
        await context.send_initial_metadata((("x-request-id", asked.request_id),))
        began = self._steps.began
        for index, chunk in enumerate(chunks):
            await self._steps.after(began + index)
            await context.write(chunk)


async def main(steps_per_s: float, warm: int) -> None:
    prepared(warm)
    server = grpc.aio.server()
    streams = Streams(Steps(steps_per_s))
    method = grpc.unary_stream_rpc_method_handler(streams.generate_stream)
    handler = grpc.method_handlers_generic_handler("holdfast.v1.Inference", {"GenerateStream": method})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say(address=f"127.0.0.1:{port}")
    await until_the_end()
    await server.stop(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps_per_s", type=float, help="0: everything at once")
    parser.add_argument("tokens", type=int, help="the length of a stream, to prepare it beforehand")
    arguments = parser.parse_args()
    run(main(arguments.steps_per_s, arguments.tokens))

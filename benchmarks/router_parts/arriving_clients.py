"""Requests for one token that arrive whatever the server does meanwhile (an open loop), and how long each takes.

An order names the rate and the seconds; with prefixes, each prompt begins with one of them. A latency counts from the
time at which the request was due, so that a client which falls behind hides nothing.
"""

import argparse
import asyncio
import itertools
import random
from typing import Any, Final

import grpc

from benchmarks.router_parts.clients import METHOD, asked
from benchmarks.router_parts.load import prefixed_prompt
from benchmarks.router_parts.orders import run, say, take_orders
from holdfast.cluster.bench.workload import Arrivals
from holdfast.v1 import inference_pb2

TIMEOUT_S: Final = 10.0
"""For a server that cannot keep up: what takes longer has failed."""


class ArrivingRequests:
    """Requests over one channel."""

    def __init__(self, address: str, num_prefixes: int) -> None:
        self._call = grpc.aio.insecure_channel(address).unary_stream(METHOD, None, None)
        self._num_prefixes = num_prefixes
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()

    async def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        times = itertools.takewhile(lambda at: at < order["seconds"], Arrivals(rate=order["rate"]).times(order["seed"]))
        due = [(at, self._prompt()) for at in times]
        began_s = self._loop.time()
        answers = [asyncio.create_task(self._answer(began_s + at, prompt)) for at, prompt in due]
        took = await asyncio.gather(*answers)
        return {"latencies_s": [one for one in took if one is not None], "num_failed": took.count(None)}

    def _prompt(self) -> bytes:
        if not self._num_prefixes:
            return asked(1)
        number = next(self._numbers)
        chosen = random.Random(number).randrange(self._num_prefixes)
        params = inference_pb2.SamplingParams(max_tokens=1)
        token_ids = inference_pb2.TokenIds(ids=prefixed_prompt(chosen, number))
        return inference_pb2.GenerateRequest(token_ids=token_ids, sampling_params=params).SerializeToString()

    async def _answer(self, due_s: float, request: bytes) -> float | None:
        await asyncio.sleep(due_s - self._loop.time())
        try:
            async for _ in self._call(request, timeout=TIMEOUT_S):
                pass
        except grpc.aio.AioRpcError:
            return None
        return self._loop.time() - due_s


async def main(address: str, num_prefixes: int) -> None:
    requests = ArrivingRequests(address, num_prefixes)
    say()
    await take_orders(requests.carry_out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--prefixes", type=int, default=0)
    arguments = parser.parse_args()
    run(main(arguments.address, arguments.prefixes))

"""Benchmark of live moves: the pauses of streams whose replica is drained, beside their usual time from token to token.

    python -m benchmarks.live_moves [--model demo] [--streams 32] [--context 1500] [--tokens 160] [--json FILE]

Starts two replicas on this machine and drains one of them, so that all streams run on the other. Once each has its
first tokens, the other is drained instead: its streams move with their blocks. Printed: the longest pause of each
stream from then on, against twice its median time from token to token before, plus 50 ms; how many streams were
identical to those of a run without a drain; and the tokens whose blocks came along.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.demo.streams import Stream, are_under_way, stream_all
from holdfast.cluster.progress_bars import progress
from holdfast.cluster.serve.serving import serving
from holdfast.v1 import admin_pb2, admin_pb2_grpc
from holdfast.worker.config import CacheConfig, ModelConfig
from holdfast.worker.sampling_params import SamplingParams

AFTER_TOKENS = 32
"""Tokens of each stream before its replica is drained."""
ALLOWED_S = 0.05
WORDS = ("once", "upon", "a", "time", "there", "was", "the", "fox", "and", "bear", "in", "wood", "who", "said")
BLOCK = 16


@dataclass(frozen=True)
class Moved:
    """One stream that was moved."""

    usual_s: float
    """Median time from token to token before."""
    pause_s: float

    @property
    def allowed_s(self) -> float:
        return 2 * self.usual_s + ALLOWED_S


class Operator:
    """Drains replicas through one router."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def drain(self, replica_id: str, *, is_over: bool = False) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub: Any = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
            if is_over:
                await stub.Undrain(admin_pb2.UndrainRequest(replica_id=replica_id))
            else:
                await stub.Drain(admin_pb2.DrainRequest(replica_id=replica_id))

    async def replicas(self) -> dict[str, Any]:
        """Statistics by id, once both are up."""
        async with AsyncClient(self._address) as client:
            while len(loads := (await client.get_load()).replicas) < 2:
                await asyncio.sleep(0.2)
        return {one.replica_id: one.stats for one in sorted(loads, key=lambda one: str(one.replica_id))}


async def run(
    address: str, prompts: Sequence[str], params: SamplingParams, *, drains: bool
) -> tuple[list[Stream], float]:
    """Streams all prompts from the first replica; what came, and when the drain was ordered."""
    operator = Operator(address)
    first, second = await operator.replicas()
    await operator.drain(second)
    ordered: list[float] = []
    moving: asyncio.Task[None] | None = None

    async def move() -> None:
        await operator.drain(second, is_over=True)
        ordered.append(time.perf_counter())
        await operator.drain(first)

    def watch(streams: Sequence[Stream], grown: Stream) -> None:
        nonlocal moving
        if drains and moving is None and are_under_way(streams, AFTER_TOKENS):
            moving = asyncio.create_task(move())

    streams = await stream_all([address], prompts, params, watch)
    if moving is not None:
        await moving
    await operator.drain(first if drains else second, is_over=True)
    return streams, ordered[0] if ordered else 0.0


def moved(streams: Sequence[Stream], ordered_s: float) -> list[Moved]:
    """The streams that had not ended when the drain was ordered."""
    found = []
    for stream in streams:
        before = [time_s for time_s in stream.token_times_s if time_s <= ordered_s]
        pause_s = stream.longest_pause_s(ordered_s)
        if pause_s is not None:
            gaps = [after - earlier for earlier, after in pairwise(before[AFTER_TOKENS // 4 :])]
            found.append(Moved(statistics.median(gaps), pause_s))
    return found


def report(rows: Sequence[Moved], num_identical: int, num_streams: int, stats: Any) -> dict[str, float]:
    """The figures of one run, in seconds."""
    pauses = sorted(one.pause_s for one in rows)
    return {
        "streams": num_streams,
        "moved": len(rows),
        "identical": num_identical,
        "usual_s": statistics.median(one.usual_s for one in rows),
        "pause_s": statistics.median(pauses),
        "longest_pause_s": pauses[-1],
        "allowed_s": statistics.median(one.allowed_s for one in rows),
        "within": sum(one.pause_s <= one.allowed_s for one in rows),
        "worst_ratio": max(one.pause_s / one.allowed_s for one in rows),
        "received_tokens": stats.num_received_tokens,
        "computed_tokens": stats.num_tokens_computed,
        "load": os.getloadavg()[0],
    }


def show(figures: dict[str, float]) -> Table:
    table = Table(box=None, show_header=False)
    for name, value in figures.items():
        table.add_row(name.replace("_s", " (ms)") if name.endswith("_s") else name.replace("_", " "),
                      f"{1000 * value:.0f}" if name.endswith("_s") else f"{value:g}")  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--context", type=int, default=1500, help="words of each prompt")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--port", type=int, default=50051)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng = random.Random(1)
    prompts = [" ".join(rng.choices(WORDS, k=args.context)) for _ in range(args.streams)]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=args.tokens, ignore_eos=True)
    # words of more than one token, and the output of both runs: no prompt of the first is computed again in the second
    num_blocks = args.streams * (-(-(5 * args.context // 4 + 2 * args.tokens) // BLOCK) + 4)
    config = HoldfastConfig(
        model=ModelConfig(model=args.model),
        cache=CacheConfig(num_blocks=num_blocks),
        cluster=ClusterConfig(replicas=2, routers=1, port=args.port),
    )
    with progress(sys.stderr) as say, serving(config, say) as cluster:
        (address,) = cluster.routers
        undisturbed, _ = asyncio.run(run(address, prompts, params, drains=False))
        streams, ordered_s = asyncio.run(run(address, prompts, params, drains=True))
        _, second = asyncio.run(Operator(address).replicas()).values()
    num_identical = sum(one.is_same_as(other) for one, other in zip(streams, undisturbed, strict=True))
    figures = report(moved(streams, ordered_s), num_identical, args.streams, second)
    Console().print(show(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

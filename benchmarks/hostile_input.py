"""Attacks on a cluster by requests of allowed size: what they cost its routers, and a stream beside them.

    python -m benchmarks.hostile_input [--entries 2900000] [--requests 6] [--json FILE]

A `holdfast serve` with two routers and the bundled model, on free ports of loopback. Each attack sends some requests at
once, as our own client does, which looks for another router when one is lost: a `logit_bias` of millions of entries
over gRPC, one over HTTP, long texts, and costly grammars. Printed for each: how the requests ended, routers whose
process changed, the longest time between two chunks of a stream beside it, and the resident memory of the routers
before, at most, and ten seconds after.
"""

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import httpx2
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.soak import MB, Cluster, started
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.worker.errors import HoldfastError
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.structured_outputs import StructuredOutputs

AFTER_S: Final = 10.0
CALM_S: Final = 5.0
LOOK_S: Final = 0.05
MAX_TOKENS: Final = 200

Attack = Callable[[Cluster, argparse.Namespace], Awaitable[str]]


async def bias_over_grpc(cluster: Cluster, options: argparse.Namespace) -> str:
    bias = dict.fromkeys(range(options.entries), 1.0)
    return await _stream(cluster, "hello", SamplingParams(max_tokens=2, logit_bias=bias))


async def bias_over_http(cluster: Cluster, options: argparse.Namespace) -> str:
    entries = ",".join(f'"{number}":1' for number in range(options.http_entries))
    body = f'{{"prompt":"hello","max_tokens":2,"logit_bias":{{{entries}}}}}'
    headers = {"content-type": "application/json"}
    try:
        async with httpx2.AsyncClient(timeout=120) as http:
            answer = await http.post(f"http://{cluster.http[0]}/v1/completions", content=body, headers=headers)
        return f"{answer.status_code}"
    except httpx2.HTTPError as error:
        return type(error).__name__


async def long_text(cluster: Cluster, options: argparse.Namespace) -> str:
    return await _stream(cluster, "word " * (options.text_bytes // 5), SamplingParams(max_tokens=2))


async def costly_regex(cluster: Cluster, options: argparse.Namespace) -> str:
    regex = "|".join(f"(a{{1,{number}}}b)" for number in range(1, 8000))
    return await _stream(
        cluster, "hello", SamplingParams(max_tokens=2, structured_outputs=StructuredOutputs(regex=regex))
    )


ATTACKS: Final[dict[str, Attack]] = {
    "logit_bias, gRPC": bias_over_grpc,
    "logit_bias, HTTP": bias_over_http,
    "long text, gRPC": long_text,
    "regex of 80 kB, gRPC": costly_regex,
}


async def _stream(cluster: Cluster, prompt: str, params: SamplingParams) -> str:
    try:
        async with AsyncClient(cluster.addresses) as client:
            async for _ in client.stream(prompt, params):
                pass
        return "served"
    except HoldfastError as error:
        return type(error).__name__


def routers_of(cluster: Cluster) -> list[psutil.Process]:
    below = psutil.Process(cluster.process.pid).children(recursive=True)
    return [one for one in below if ":Router" in " ".join(one.cmdline())]


def resident_mb(cluster: Cluster) -> float:
    return sum(float(one.memory_info().rss) for one in routers_of(cluster)) / MB


class Beside:
    """A client that streams all the time, in a process of its own, and the longest of its pauses."""

    def __init__(self, addresses: Sequence[str]) -> None:
        context = get_context("spawn")
        self._longest_s = context.Value("d", 0.0)
        self._process = context.Process(target=_stream_on, args=(tuple(addresses), self._longest_s), daemon=True)
        self._process.start()

    async def since_last(self) -> float:
        """The longest pause since the last time that this was asked, once there was any."""
        while not self._longest_s.value:
            await asyncio.sleep(LOOK_S)
        with self._longest_s.get_lock():
            longest_s, self._longest_s.value = float(self._longest_s.value), 0.0
        return longest_s

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _stream_on(addresses: Sequence[str], longest_s: Any) -> None:
    async def run() -> None:
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=MAX_TOKENS, ignore_eos=True)
        async with AsyncClient(addresses) as client:
            while True:
                last_s = time.monotonic()
                async for _ in client.stream("Once upon a time", params):
                    now_s = time.monotonic()
                    with longest_s.get_lock():
                        longest_s.value = max(longest_s.value, now_s - last_s)
                    last_s = now_s

    asyncio.run(run())


async def watch_memory(cluster: Cluster, seen: list[float]) -> None:
    while True:
        with suppress(psutil.Error):  # one has just ended
            seen.append(resident_mb(cluster))
        await asyncio.sleep(LOOK_S)


async def measure(cluster: Cluster, attack: Attack, options: argparse.Namespace) -> dict[str, Any]:
    before, seen = {one.pid for one in routers_of(cluster)}, [resident_mb(cluster)]
    beside, watching = Beside(cluster.addresses), asyncio.create_task(watch_memory(cluster, seen))
    await beside.since_last()  # its start
    await asyncio.sleep(CALM_S)
    calm_s = await beside.since_last()
    endings = Counter(await asyncio.gather(*(attack(cluster, options) for _ in range(options.requests))))
    worst_s = await beside.since_last()
    beside.end()
    await asyncio.sleep(AFTER_S)
    watching.cancel()
    await asyncio.wait([watching])
    return {
        "endings": ", ".join(f"{count} {name}" for name, count in endings.items()),
        "routers lost": len(before - {one.pid for one in routers_of(cluster)}),
        "longest pause beside, s": worst_s,
        "without an attack, s": calm_s,
        "MB before": seen[0],
        "at most": max(seen),
        "after": resident_mb(cluster),
    }


async def attacked(cluster: Cluster, options: argparse.Namespace, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {name: await measure(cluster, ATTACKS[name], options) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_300_000, help="of logit_bias over gRPC; 11 bytes each")
    parser.add_argument("--http-entries", type=int, default=1_000_000)
    parser.add_argument("--text-bytes", type=int, default=15_000_000)
    parser.add_argument("--requests", type=int, default=6, help="of each attack, at once")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with started("attacked", ["--replicas", "1"]) as cluster:
        found = asyncio.run(attacked(cluster, options, options.attacks))
    table = Table("attack", *next(iter(found.values())))
    for name, row in found.items():
        table.add_row(name, *(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    console = Console(width=170)
    console.print(table)
    console.print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

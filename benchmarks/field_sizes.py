"""Every field of every API, as large as may be sent: how long a router's loop stands still for one, and for eight.

    python -m benchmarks.field_sizes [--only TEXT ...] [--worst 40] [--json FILE]

A router with default limits and all of its APIs, a replica that only counts, and a client that streams beside; each is
a process. Fields are found in the schemas. Each is filled up to `max_message_bytes`, and up to what its bounds let
through, with each kind of content. The table has the worst: the longest time that the loop did not turn, the same
without what its thread waited for a core, the most CPU time that it took in a turn, the longest pause of the stream,
and resident memory. At the end: memory before all, and ten seconds after.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Final

import grpc
from rich.console import Console
from rich.table import Table

from benchmarks.hostile_input import Beside
from benchmarks.router_parts.hostile_fields import SERVICES, Hostile, hostile_bodies, hostile_messages
from benchmarks.router_parts.large_fields import large_bodies, large_messages
from benchmarks.router_parts.part import Part
from benchmarks.soak import MB
from holdfast.router.config import LimitsConfig

AT_ONCE: Final = (1, 8)
STEPS_PER_S: Final = "100"
ANSWER_S: Final = 120.0
AFTER_S: Final = 10.0
METHODS: Final = {
    method.input_type.full_name: (f"/{service.full_name}/{method.name}", method)
    for service in reversed(SERVICES)
    for method in service.methods
}
"""One for each sort of request."""

Row = dict[str, Any]


class Attacker:
    """Sends what it is given to the APIs of one router, and waits until it is answered in whichever way."""

    def __init__(self, grpc_address: str, http_address: str, vllm_address: str) -> None:
        self._http = http_address
        self._channels = [grpc.aio.insecure_channel(one, options=_OPTIONS) for one in (grpc_address, vllm_address)]

    async def send(self, one: Hostile) -> str:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await (self._post(one) if one.api.startswith("/") else self._call(one))
        except (grpc.aio.AioRpcError, OSError, TimeoutError) as error:
            return error.code().name if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__

    async def _call(self, one: Hostile) -> str:
        path, method = METHODS[one.api]
        channel = self._channels[path.startswith("/vllm.")]
        if method.client_streaming:
            stream = channel.stream_stream(path, None, None)(iter([one.data]))
            async for _ in stream:
                break
            stream.cancel()
        elif method.server_streaming:
            answers = channel.unary_stream(path, None, None)(one.data)
            async for _ in answers:
                if method.name in _ENDLESS:
                    answers.cancel()
                    break
        else:
            await channel.unary_unary(path, None, None)(one.data)
        return "OK"

    async def _post(self, one: Hostile) -> str:
        host, _, port = self._http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {one.api} HTTP/1.1\r\nhost: {self._http}\r\ncontent-type: application/json\r\nconnection: close"
        with suppress(ConnectionError):
            writer.write(f"{head}\r\ncontent-length: {len(one.data)}\r\n\r\n".encode() + one.data)
            await writer.drain()
        status = await reader.readline()
        while await reader.read(2**16):
            pass
        writer.close()
        return status.decode().partition(" ")[2].strip()


_ENDLESS: Final = ("Watch",)
"""Methods whose answers end with their client."""

_OPTIONS: Final = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


async def measure(attacker: Attacker, router: Part, beside: Beside, one: Hostile, count: int) -> Row:
    router.order("look")
    await beside.since_last()
    endings = await asyncio.gather(*(attacker.send(one) for _ in range(count)))
    seen = router.order("look")
    return {
        "api": one.api,
        "field": one.field,
        "MB": len(one.data) / MB,
        "at once": count,
        "ended": endings[0],
        "stall, ms": 1e3 * seen["stall_s"],
        "but for a core, ms": 1e3 * seen["own_stall_s"],
        "CPU of a turn, ms": 1e3 * seen["turn_cpu_s"],
        "pause beside, ms": 1e3 * await beside.since_last(),
        "at most, MB": seen["peak_bytes"] / MB,
    }


def cases(limits: LimitsConfig, only: Sequence[str]) -> Iterator[Hostile]:
    def is_wanted(name: str) -> bool:
        return not only or any(text in name for text in only)

    yield from large_messages(limits, is_wanted)
    yield from large_bodies(limits, is_wanted)
    size = limits.max_message_bytes - 2048
    for one in chain(hostile_messages(size), hostile_bodies(size)):
        if is_wanted(f"{one.api} {one.field}"):
            yield one


async def run(router: Part, limits: LimitsConfig, only: Sequence[str]) -> list[Row]:
    attacker, rows = Attacker(*router.address.split()), list[Row]()
    beside = Beside([router.address.split()[0]])
    await beside.since_last()
    before = router.order("look")["resident_bytes"] / MB
    for one in cases(limits, only):
        for count in AT_ONCE:
            rows.append(await measure(attacker, router, beside, one, count))
            print(" ".join(f"{value:.1f}" if isinstance(value, float) else str(value) for value in rows[-1].values()))
    beside.end()
    time.sleep(AFTER_S)
    print(f"resident: {before:.0f} MB before, {router.order('look')['resident_bytes'] / MB:.0f} MB after")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=(), help="parts of the names of APIs and fields")
    parser.add_argument("--limits", default="{}", help="JSON: limits by name")
    parser.add_argument("--worst", type=int, default=40, help="rows that are shown")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    limits = LimitsConfig.model_validate_json(options.limits)
    with ExitStack() as stack:
        replica = stack.enter_context(Part("replica", STEPS_PER_S))
        router = stack.enter_context(Part("probed_router", replica.address, "--limits", options.limits))
        rows = asyncio.run(run(router, limits, options.only))
    rows.sort(key=lambda row: -float(row["but for a core, ms"]))
    table = Table(*rows[0])
    for row in rows[: options.worst]:
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    console = Console(width=200)
    console.print(table)
    console.print(f"{len(rows)} rows; load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

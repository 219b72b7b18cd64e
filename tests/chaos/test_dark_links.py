"""A network that swallows everything without a word, and a disk that takes no more logs."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cluster.client import AsyncClient
from tests.chaos.forked import ForkedCluster, forked_cluster
from tests.chaos.kinds import KINDS, Answer, Kind, ask
from tests.chaos.tally import Row, Tally
from tests.fakes import Wire

pytestmark = pytest.mark.timeout(120)

STRUCK_AT = 8
"""Tokens."""


async def struck(client: AsyncClient, kind: Kind, row: Row, strike: Callable[[], Awaitable[object]]) -> None:
    """One request, in the middle of which something happens; its client must not notice."""
    right = await ask(client, kind)
    assert right.is_whole
    reached = asyncio.Event()

    def look(answer: Answer) -> None:
        if answer.num_tokens >= STRUCK_AT:
            reached.set()

    asking = asyncio.create_task(ask(client, kind, look))
    await reached.wait()
    struck_s = time.monotonic()
    await strike()
    answer = await asking
    row.num_faults += 1
    row.judge(answer, right)
    row.pauses_s += [pause_s for pause_s in [answer.longest_pause_after(struck_s)] if pause_s is not None]
    assert row.is_clean, row.differences


def test_a_link_to_a_replica_may_go_dark(tmp_path: Path, tally: Tally):
    async def run() -> None:
        async with forked_cluster(tmp_path, wired=True) as cluster, AsyncClient(cluster.addresses) as client:

            async def go_dark() -> None:
                victim = await cluster.serving_replica(lambda: False)
                assert victim is not None
                cluster.wires[victim.id].go_dark()

            for kind in KINDS[:2]:
                await struck(client, kind.longer(60), tally.row("dark link to the replica"), go_dark)

    asyncio.run(run())


async def behind_wires(cluster: ForkedCluster) -> list[Wire]:
    return [await Wire.start(int(address.rpartition(":")[2])) for address in cluster.addresses]


def test_a_link_to_a_router_may_go_dark(tmp_path: Path, tally: Tally):
    async def run() -> None:
        async with forked_cluster(tmp_path) as cluster:
            wires = await behind_wires(cluster)
            async with AsyncClient([f"127.0.0.1:{wire.port}" for wire in wires], draw=lambda: 0.0) as client:

                async def go_dark() -> None:
                    wires[0].go_dark()

                await struck(client, KINDS[0].longer(60), tally.row("dark link to the router"), go_dark)
            for wire in wires:
                await wire.stop()

    asyncio.run(run())


def test_logs_that_cannot_be_written_hold_nothing_up(tmp_path: Path, tally: Tally):
    async def run() -> None:
        with open("/dev/full", "w") as full:
            async with forked_cluster(tmp_path, stderr=full) as cluster, AsyncClient(cluster.addresses) as client:

                async def kill() -> None:
                    victim = await cluster.serving_replica(lambda: False)
                    assert victim is not None
                    victim.send(signal.SIGKILL)
                    cluster.forget(victim)
                    await cluster.add_replica()

                for kind in KINDS[:3]:
                    await cluster.until_up()
                    await struck(client, kind.longer(60), tally.row("SIGKILL, disk of the logs full"), kill)

    asyncio.run(run())

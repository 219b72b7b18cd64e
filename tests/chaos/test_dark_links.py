"""Faults around the processes: a network that swallows everything, a disk that takes no more logs, scarce memory."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from holdfast.cluster.client.async_client import AsyncClient
from tests import loops
from tests.chaos.faults import KILLED_REPLICA, KILLED_ROUTER, Fault
from tests.chaos.forked import ForkedCluster, forked_cluster, loads
from tests.chaos.kinds import KINDS, Answer, Kind, ask
from tests.chaos.tally import Row, Tally
from tests.fakes import Wire
from tests.programs import started
from tests.under_way import were_under_way

LIMIT_S = 120
pytestmark = pytest.mark.timeout(LIMIT_S + 60)

STRUCK_AT = 8
"""Tokens."""

NUM_BLOCKS = 24
MAX_HOG_BYTES = 4 * 2**30


MAX_TRIES = 5
"""Requests, until one is struck: on a busy machine one may end before it is seen where it runs."""


async def struck(
    client: AsyncClient, kind: Kind, row: Row, strike: Callable[[Callable[[], bool]], Awaitable[bool]]
) -> None:
    """One request, in the middle of which something happens; its client must not notice. `strike` is told how to see
    that the request is over, and returns False if that came first: then another request is tried.
    """
    right = await ask(client, kind)
    assert right.is_whole
    tries = [await _struck_once(client, kind, right, row, strike)]
    while not tries[-1]:
        assert len(tries) < MAX_TRIES, "each request was over before it was struck"
        tries.append(await _struck_once(client, kind, right, row, strike))


async def _struck_once(
    client: AsyncClient, kind: Kind, right: Answer, row: Row, strike: Callable[[Callable[[], bool]], Awaitable[bool]]
) -> bool:
    reached = asyncio.Event()

    def look(answer: Answer) -> None:
        if answer.num_tokens >= STRUCK_AT:
            reached.set()

    asking = asyncio.create_task(ask(client, kind, look))
    await reached.wait()
    struck_s = time.monotonic()
    if not await strike(asking.done):
        await asking
        return False
    answer = await asking
    if not kind.is_whole:
        were_under_way([answer.arrivals_s], struck_s)
    row.num_faults += 1
    row.judge(answer, right)
    row.pauses_s += [pause_s for pause_s in [answer.longest_pause_after(struck_s)] if pause_s is not None]
    assert row.is_clean, row.differences
    return True


@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.slow)], ids=lambda kind: kind.name)
def test_a_link_to_a_replica_may_go_dark(tmp_path: Path, tally: Tally, kind: Kind):
    async def run() -> None:
        async with forked_cluster(tmp_path, wired=True) as cluster, AsyncClient(cluster.addresses) as client:

            async def go_dark(is_over: Callable[[], bool]) -> bool:
                victim = await cluster.serving_replica(is_over)
                if victim is not None:
                    cluster.wires[victim.id].go_dark()
                return victim is not None

            await struck(client, kind.longer(60), tally.row("dark link to the replica"), go_dark)

    loops.run(run(), timeout_s=LIMIT_S)


async def behind_wires(cluster: ForkedCluster) -> list[Wire]:
    return [await Wire.start(int(address.rpartition(":")[2])) for address in cluster.addresses]


@pytest.mark.slow
def test_a_link_to_a_router_may_go_dark(tmp_path: Path, tally: Tally):
    async def run() -> None:
        async with forked_cluster(tmp_path) as cluster:
            wires = await behind_wires(cluster)
            async with AsyncClient([f"127.0.0.1:{wire.port}" for wire in wires], draw=lambda: 0.0) as client:

                async def go_dark(is_over: Callable[[], bool]) -> bool:
                    wires[0].go_dark()
                    return True

                await struck(client, KINDS[0].longer(60), tally.row("dark link to the router"), go_dark)
            for wire in wires:
                await wire.stop()

    loops.run(run(), timeout_s=LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [KILLED_REPLICA, KILLED_ROUTER], ids=lambda fault: fault.name)
def test_logs_that_cannot_be_written_hold_nothing_up(tmp_path: Path, tally: Tally, fault: Fault):
    """The system says of every write that the disk is full, in routers and replicas, from their first line on."""

    async def run() -> None:
        with open("/dev/full", "w") as full:
            async with forked_cluster(tmp_path, stderr=full) as cluster, AsyncClient(cluster.addresses) as client:

                async def strike(is_over: Callable[[], bool]) -> bool:
                    victim = await fault.choose(cluster, is_over)
                    if victim is None:
                        return False
                    await fault.strike(victim)
                    await fault.mend(cluster, victim)
                    return True

                for kind in KINDS[:3]:
                    await cluster.until_up()
                    await struck(client, kind.longer(60), tally.row(f"{fault.name}, disk of the logs full"), strike)

    loops.run(run(), timeout_s=LIMIT_S)


@pytest.mark.slow
def test_memory_that_others_take_holds_nothing_up(tmp_path: Path, tally: Tally):
    """A neighbour takes a quarter of what is free, while the cache is so small that requests are preempted."""

    async def run() -> None:
        row = tally.row("memory pressure")
        async with forked_cluster(tmp_path, num_blocks=NUM_BLOCKS) as cluster, AsyncClient(cluster.addresses) as client:
            kinds = [kind.longer(60) for kind in KINDS if kind.may_meet_itself]
            right = [await ask(client, kind) for kind in kinds]
            assert all(answer.is_whole for answer in right)
            async with memory_hog(min(MAX_HOG_BYTES, psutil.virtual_memory().available // 4)):
                answers = await asyncio.gather(*(ask(client, kind) for kind in kinds * 3))
            for answer, wanted in zip(answers, right * 3, strict=True):
                row.judge(answer, wanted)
            row.num_faults += 1
            num_preemptions = [load.stats.num_preemptions for load in await loads(cluster.watchers[0])]
        assert row.is_clean, row.differences
        assert sum(num_preemptions) > 0, "memory was meant to be short"

    loops.run(run(), timeout_s=LIMIT_S)


@asynccontextmanager
async def memory_hog(num_bytes: int) -> AsyncIterator[None]:
    """A process that has taken so much, and touched every page of it."""
    program = f"import sys; taken = bytearray(b'x') * {num_bytes}; print('taken', flush=True); sys.stdin.read()"
    async with started(sys.executable, "-c", program) as hog:
        assert hog.stdout is not None
        assert await asyncio.to_thread(hog.stdout.readline) == "taken\n"
        yield

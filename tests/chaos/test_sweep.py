"""Every kind of request loses what serves it at every token, and its client cannot tell.

The processes are real, and so are the signals. What may not live here: a cluster as users run it (`test_steady_load.py`).
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest

from cluster.client import AsyncClient
from tests.chaos.forked import Forked, ForkedCluster, forked_cluster
from tests.chaos.kinds import KINDS, Answer, Kind, ask
from tests.chaos.tally import Row, Tally

pytestmark = pytest.mark.timeout(180)

TARGETS = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@dataclass(frozen=True)
class Fault:
    """Something that is done to the process that serves a stream, and what has to be done before the next."""

    name: str
    strike: Callable[[ForkedCluster], Awaitable[Forked]]
    """Returns the victim."""
    mend: Callable[[ForkedCluster, Forked], Awaitable[None]]


async def kill_replica(cluster: ForkedCluster) -> Forked:
    victim = await cluster.serving_replica()
    victim.send(signal.SIGKILL)
    return victim


async def freeze_replica(cluster: ForkedCluster) -> Forked:
    victim = await cluster.serving_replica()
    victim.send(signal.SIGSTOP)
    return victim


async def replace_replica(cluster: ForkedCluster, victim: Forked) -> None:
    victim.send(signal.SIGKILL)
    cluster.forget(victim)
    await cluster.add_replica()


async def kill_router(cluster: ForkedCluster) -> Forked:
    victim = await cluster.serving_router()
    victim.send(signal.SIGKILL)
    return victim


async def freeze_router(cluster: ForkedCluster) -> Forked:
    victim = await cluster.serving_router()
    victim.send(signal.SIGSTOP)
    return victim


async def replace_router(cluster: ForkedCluster, victim: Forked) -> None:
    victim.send(signal.SIGKILL)
    await cluster.replace_router(victim)


KILLED_REPLICA = Fault("SIGKILL of the replica", kill_replica, replace_replica)
FROZEN_REPLICA = Fault("SIGSTOP of the replica", freeze_replica, replace_replica)
KILLED_ROUTER = Fault("SIGKILL of the router", kill_router, replace_router)
FROZEN_ROUTER = Fault("SIGSTOP of the router", freeze_router, replace_router)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def cluster(loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCluster]:
    making = forked_cluster(tmp_path_factory.mktemp("sweep"))
    yield loop.run(making.__aenter__())
    loop.run(making.__aexit__(None, None, None))


async def sweep(cluster: ForkedCluster, kind: Kind, fault: Fault, row: Row, every: int) -> None:
    """Strikes at every `every`-th token of a request. Asserts that each strike hit an open stream that nobody misses."""
    async with AsyncClient(cluster.addresses) as client:
        await cluster.until_up()
        right = await ask(client, kind)
        assert right.is_whole
        for num_tokens in range(1, right.num_tokens, every):
            await cluster.until_up()
            before = await cluster.num_computed()
            answer, victim = await struck(cluster, client, kind, fault, num_tokens, row)
            row.judge(answer, right)
            after = await cluster.num_computed()
            survivors = before.keys() & after.keys() - {victim.id}
            fresh = sum(after[name] - before[name] for name in survivors)
            row.num_recomputed += max(0, fresh - (right.num_tokens - num_tokens))
            await fault.mend(cluster, victim)
    assert row.is_clean, row.differences


async def struck(
    cluster: ForkedCluster, client: AsyncClient, kind: Kind, fault: Fault, num_tokens: int, row: Row
) -> tuple[Answer, Forked]:
    """An answer to a request, and who was struck when `num_tokens` of it had come."""
    reached = asyncio.Event()
    seen = Answer()

    def look(answer: Answer) -> None:
        nonlocal seen
        seen = answer
        if answer.num_tokens >= num_tokens:
            reached.set()

    asking = asyncio.create_task(ask(client, kind, look))
    await reached.wait()
    victim = await fault.strike(cluster)
    struck_s = time.monotonic()
    assert not seen.is_over, "a strike after the end proves nothing"
    row.num_faults += 1
    answer = await asking
    if (pause_s := answer.pause_after(struck_s)) is not None:
        row.pauses_s.append(pause_s)
    return answer, victim


@TARGETS
def test_the_replica_may_be_killed_at_every_token(
    loop: asyncio.Runner, cluster: ForkedCluster, kind: Kind, tally: Tally
):
    loop.run(sweep(cluster, kind, KILLED_REPLICA, tally.row(KILLED_REPLICA.name), every=1))


@TARGETS
def test_the_router_may_be_killed_at_every_third_token(
    loop: asyncio.Runner, cluster: ForkedCluster, kind: Kind, tally: Tally
):
    loop.run(sweep(cluster, kind, KILLED_ROUTER, tally.row(KILLED_ROUTER.name), every=3))


@TARGETS
def test_the_replica_may_freeze(loop: asyncio.Runner, cluster: ForkedCluster, kind: Kind, tally: Tally):
    loop.run(sweep(cluster, kind, FROZEN_REPLICA, tally.row(FROZEN_REPLICA.name), every=13))


def test_the_router_may_freeze(loop: asyncio.Runner, cluster: ForkedCluster, tally: Tally):
    loop.run(sweep(cluster, KINDS[-1], FROZEN_ROUTER, tally.row(FROZEN_ROUTER.name), every=20))

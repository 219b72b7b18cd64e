"""Every kind of request loses what serves it at every token, and its client cannot tell.

The processes are real, and so are the signals. What may not live here: a cluster as users run it.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from cluster.client import AsyncClient
from tests.chaos.faults import (
    FROZEN_REPLICA,
    FROZEN_ROUTER,
    KILLED_REPLICA,
    KILLED_ROUTER,
    STARVED_REPLICA,
    STARVED_ROUTER,
    Fault,
)
from tests.chaos.forked import Forked, ForkedCluster, forked_cluster
from tests.chaos.kinds import KINDS, Answer, Kind, ask
from tests.chaos.tally import Row, Tally

pytestmark = pytest.mark.timeout(180)

TARGETS = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)

MOST_TRIES = 10
"""On a busy machine a signal may come after the end of a stream, which proves nothing: then it is asked for again."""


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def cluster(loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCluster]:
    making = forked_cluster(tmp_path_factory.mktemp("sweep"))
    yield loop.run(making.__aenter__())
    loop.run(making.__aexit__(None, None, None))


@dataclass(frozen=True)
class Sweep:
    """One request, struck by one fault at one token after the other."""

    cluster: ForkedCluster
    client: AsyncClient
    kind: Kind
    fault: Fault
    right: Answer
    right_s: float
    """How long that took."""
    row: Row

    async def run(self, every: int) -> None:
        """Strikes when 1, 1 + `every`, ... tokens have come, up to the last but one."""
        for num_tokens in range(1, self.right.num_tokens, every):
            for _ in range(MOST_TRIES):
                if await self.strike(num_tokens):
                    break
            else:
                raise AssertionError(f"no signal hit the open stream after token {num_tokens}")

    async def strike(self, num_tokens: int) -> bool:
        """Asks once, and strikes when that many tokens have come. Whether the request was open then."""
        await self.cluster.until_up()
        before = await self.cluster.num_computed()
        reached = asyncio.Event()

        def look(answer: Answer) -> None:
            if answer.num_tokens >= num_tokens:
                reached.set()

        asking = asyncio.create_task(ask(self.client, self.kind, look))
        if self.kind.is_whole:  # nobody sees its tokens: they come at a steady pace
            await asyncio.sleep(self.right_s * num_tokens / self.right.num_tokens)
        else:
            await reached.wait()
        victim = await self.fault.choose(self.cluster, asking.done)
        if victim is None or asking.done():
            await asking
            return False
        struck_s = time.monotonic()
        await self.fault.strike(victim)
        answer = await asking
        self.row.num_faults += 1
        self.row.pauses_s += [pause_s for pause_s in [answer.longest_pause_after(struck_s)] if pause_s is not None]
        self.row.judge(answer, self.right)
        self.row.num_recomputed += await self.num_recomputed(before, victim, num_tokens)
        await self.fault.mend(self.cluster, victim)
        return True

    async def num_recomputed(self, before: dict[str, int], victim: Forked, num_tokens: int) -> int:
        """What the others have computed beyond the tokens that were still to come, where that is known."""
        if self.kind.is_whole:
            return 0
        after = await self.cluster.num_computed()
        survivors = before.keys() & after.keys() - {victim.id}
        num_computed = sum(after[name] - before[name] for name in survivors)
        return max(0, num_computed - (self.right.num_tokens - num_tokens))


async def sweep(cluster: ForkedCluster, kind: Kind, fault: Fault, tally: Tally, every: int) -> None:
    async with AsyncClient(cluster.addresses) as client:
        began_s = time.monotonic()
        right = await ask(client, kind)
        right_s = time.monotonic() - began_s
        assert right.is_whole
        row = tally.row(f"{fault.name}, {kind.name}")
        await Sweep(cluster, client, kind, fault, right, right_s, row).run(every)
    assert row.is_clean, row.differences


@pytest.mark.slow
@TARGETS
def test_the_replica_may_be_killed_at_every_token(
    loop: asyncio.Runner, cluster: ForkedCluster, kind: Kind, tally: Tally
):
    loop.run(sweep(cluster, kind, KILLED_REPLICA, tally, every=1))


@TARGETS
def test_the_replica_may_be_killed_at_any_token(loop: asyncio.Runner, cluster: ForkedCluster, kind: Kind, tally: Tally):
    """As above, in a tenth of the time."""
    loop.run(sweep(cluster, kind, KILLED_REPLICA, tally, every=12))


@pytest.mark.slow
@TARGETS
def test_the_router_may_be_killed_at_every_third_token(
    loop: asyncio.Runner, cluster: ForkedCluster, kind: Kind, tally: Tally
):
    loop.run(sweep(cluster, kind, KILLED_ROUTER, tally, every=3))


@TARGETS
def test_the_router_may_be_killed_at_any_token(loop: asyncio.Runner, cluster: ForkedCluster, kind: Kind, tally: Tally):
    loop.run(sweep(cluster, kind, KILLED_ROUTER, tally, every=20))


@pytest.mark.slow
@TARGETS
def test_the_replica_may_freeze(loop: asyncio.Runner, cluster: ForkedCluster, kind: Kind, tally: Tally):
    loop.run(sweep(cluster, kind, FROZEN_REPLICA, tally, every=17))


@pytest.mark.slow
def test_the_router_may_freeze(loop: asyncio.Runner, cluster: ForkedCluster, tally: Tally):
    loop.run(sweep(cluster, KINDS[0], FROZEN_ROUTER, tally, every=20))


@pytest.mark.slow
@TARGETS
def test_the_replica_may_run_out_of_memory(loop: asyncio.Runner, cluster: ForkedCluster, kind: Kind, tally: Tally):
    loop.run(sweep(cluster, kind, STARVED_REPLICA, tally, every=5))


@pytest.mark.slow
@TARGETS
def test_the_router_may_run_out_of_memory(loop: asyncio.Runner, cluster: ForkedCluster, kind: Kind, tally: Tally):
    loop.run(sweep(cluster, kind.longer(100), STARVED_ROUTER, tally, every=30))


@pytest.mark.parametrize("fault", [STARVED_REPLICA, STARVED_ROUTER], ids=lambda fault: fault.name)
def test_memory_may_run_out(loop: asyncio.Runner, cluster: ForkedCluster, fault: Fault, tally: Tally):
    """As above, for one kind of request."""
    loop.run(sweep(cluster, KINDS[0].longer(100), fault, tally, every=40))

"""Every kind of request loses what serves it at every token, and its client cannot tell.

The processes are real, and so are the signals.
"""

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from holdfast.cluster.client.async_client import AsyncClient
from tests.chaos.faults import (
    FROZEN_REPLICA,
    FROZEN_ROUTER,
    KILLED_REPLICA,
    KILLED_ROUTER,
    STARVED_REPLICA,
    STARVED_ROUTER,
    Fault,
)
from tests.chaos.forked import STEP_S, ForkedCluster, forked_cluster
from tests.chaos.kinds import KINDS, Kind, ask
from tests.chaos.sweep import sweep
from tests.chaos.tally import Tally

pytestmark = pytest.mark.timeout(180)

TARGETS = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
OF_REPLICAS = ("greedy", "JSON schema", "n=2", "speculation", "beam search")
OF_ROUTERS = ("stop strings", "unseeded", "chat", "best_of")
"""What is tried every time."""


def targets(usual: Sequence[str]) -> pytest.MarkDecorator:
    """Every kind of request; what is not usual, with the slow tests."""
    cases = [pytest.param(kind, marks=[] if kind.name in usual else pytest.mark.slow, id=kind.name) for kind in KINDS]
    return pytest.mark.parametrize("kind", cases)


@pytest.fixture(scope="module")
def cluster(loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCluster]:
    making = forked_cluster(tmp_path_factory.mktemp("sweep"))
    yield loop.run(making.__aenter__())
    loop.run(making.__aexit__(None, None, None))


def test_steps_take_their_time(loop: asyncio.Runner, cluster: ForkedCluster):
    """Else faults come between no two tokens."""

    async def times() -> list[float]:
        async with AsyncClient(cluster.addresses) as client:
            await cluster.until_up()
            return (await ask(client, KINDS[0].longer(40))).arrivals_s

    arrivals_s = loop.run(times())
    assert arrivals_s[-1] - arrivals_s[0] > 38 * STEP_S


@pytest.mark.slow
@TARGETS
def test_the_replica_may_be_killed_at_every_token(
    loop: asyncio.Runner, cluster: ForkedCluster, kind: Kind, tally: Tally
):
    loop.run(sweep(cluster, kind, KILLED_REPLICA, tally, every=1))


@targets(OF_REPLICAS)
def test_the_replica_may_be_killed_at_any_token(loop: asyncio.Runner, cluster: ForkedCluster, kind: Kind, tally: Tally):
    """As above, in a tenth of the time."""
    loop.run(sweep(cluster, kind, KILLED_REPLICA, tally, every=12))


@pytest.mark.slow
@TARGETS
def test_the_router_may_be_killed_at_every_third_token(
    loop: asyncio.Runner, cluster: ForkedCluster, kind: Kind, tally: Tally
):
    loop.run(sweep(cluster, kind, KILLED_ROUTER, tally, every=3))


@targets(OF_ROUTERS)
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


@pytest.mark.parametrize(
    "fault", [STARVED_REPLICA, pytest.param(STARVED_ROUTER, marks=pytest.mark.slow)], ids=lambda fault: fault.name
)
def test_memory_may_run_out(loop: asyncio.Runner, cluster: ForkedCluster, fault: Fault, tally: Tally):
    """As above, for one kind of request, after its first token."""
    loop.run(sweep(cluster, KINDS[0].longer(100), fault, tally, every=100))

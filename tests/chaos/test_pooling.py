"""Calls for vectors lose the replica or the router that computes them, and get the bits of a run without faults."""

import asyncio
from pathlib import Path

import pytest

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.router.wire.pooling_codec import PooledOutput
from tests import loops
from tests.chaos.faults import KILLED_REPLICA, KILLED_ROUTER, Fault
from tests.chaos.forked import ForkedCluster, forked_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]

TEXTS = [f"{number}. " + "The quick brown fox jumps over the lazy dog. " * (1 + number % 7) for number in range(200)]
STEP_S = 0.1
"""Seconds of a step: a call takes many of them."""
NUM_TRIES = 5
LIMIT_S = 300


async def struck(cluster: ForkedCluster, client: AsyncClient, fault: Fault) -> tuple[PooledOutput, ...] | None:
    """The results of a call whose replica or router ended meanwhile; None: it was over before."""
    await cluster.until_up()
    asking = asyncio.create_task(client.pool(TEXTS))
    victim = await fault.choose(cluster, asking.done)
    if victim is None or asking.done():
        await asking
        return None
    await fault.strike(victim)
    was_open = not asking.done()
    outputs = (await asking).outputs
    await fault.mend(cluster, victim)
    return outputs if was_open else None


@pytest.mark.parametrize("fault", [KILLED_REPLICA, KILLED_ROUTER], ids=lambda fault: fault.name)
def test_vectors_are_those_of_a_run_without_faults(tmp_path: Path, fault: Fault):
    async def run() -> None:
        async with (
            forked_cluster(tmp_path, step_s=STEP_S, model={"runner": "pooling"}) as cluster,
            AsyncClient(cluster.addresses) as client,
        ):
            right = (await client.pool(TEXTS)).outputs
            assert len({one.values for one in right}) == len(TEXTS)
            for _ in range(NUM_TRIES):
                found = await struck(cluster, client, fault)
                if found is not None:
                    assert [one.values for one in found] == [one.values for one in right]
                    return
            raise AssertionError("no signal came while the call was open")

    loops.run(run(), timeout_s=LIMIT_S)

"""A bit of a replica's weights flips while it serves: its self-check finds it, and what ran there goes on elsewhere."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.cluster.client.async_client import AsyncClient
from tests import loops
from tests.chaos.forked import POLL_S, ForkedCluster, forked_cluster, loads
from tests.chaos.kinds import KINDS, Answer, ask

LIMIT_S = 120
pytestmark = pytest.mark.timeout(LIMIT_S + 60)

NUM_CLIENTS = 6
ROTS_AT_STEP = 150
ASKS = tuple(kind.longer(60) for kind in KINDS[:2])


@dataclass
class Clients:
    """Clients that never stop asking, and what they were told."""

    is_over: bool = False
    num_right: int = 0

    async def run(self, client: AsyncClient, right: list[Answer]) -> None:
        while not self.is_over:
            for kind, wanted in zip(ASKS, right, strict=True):
                answer = await ask(client, kind)
                assert answer.is_whole, answer.error
                assert answer.num_doubled == 0
                assert answer.num_tokens == wanted.num_tokens
                self.num_right += answer == wanted


async def until_lost(cluster: ForkedCluster, replica_id: str) -> None:
    """No router has it any more."""
    for watcher in cluster.watchers:
        while replica_id in [load.replica_id for load in await loads(watcher)]:
            await asyncio.sleep(POLL_S)


@pytest.mark.slow  # in one process, test_known_answer_bits.py does it every time
def test_a_replica_that_begins_to_compute_wrongly_is_lost_and_its_streams_go_on(tmp_path: Path):
    async def run() -> None:
        async with (
            forked_cluster(tmp_path, self_check_every_s=0.2, stderr=log) as cluster,
            AsyncClient(cluster.addresses) as client,
        ):
            right = [await ask(client, kind) for kind in ASKS]
            assert all(answer.is_whole for answer in right)
            healthy = set(cluster.replicas)
            rotten = await cluster.add_replica(rots_at_step=ROTS_AT_STEP)
            await cluster.until_up()
            clients = Clients()
            asking = [asyncio.create_task(clients.run(client, right)) for _ in range(NUM_CLIENTS)]
            await until_lost(cluster, rotten.id)
            clients.is_over = True
            await asyncio.gather(*asking)
            assert clients.num_right > 0
            for watcher in cluster.watchers:
                assert {load.replica_id for load in await loads(watcher)} == healthy, "the others were right"
            for _ in range(3):
                assert [await ask(client, kind) for kind in ASKS] == right

    with (tmp_path / "log").open("w") as log:
        loops.run(run(), timeout_s=LIMIT_S)
    assert (tmp_path / "log").read_text().count("the replica answered its self-check wrongly: ") >= 1

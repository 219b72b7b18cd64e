"""Pinned adapters are resident in real replicas before any request, keep their slot, and are so again in a replica that
takes a killed one's place.
"""

import asyncio
import re
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest

from holdfast.cluster.bundled_model.bundled_model import bundled_path
from tests import loops
from tests.chaos.faults import KILLED_REPLICA
from tests.chaos.forked import ForkedCluster, forked_cluster
from tests.worker.models.adapter_folders import save_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LOADS = re.compile(r'holdfast_replica_adapter_loads_total\{model="[^"]*",replica="([^"]*)"\} (\d+)')


async def loads(client: httpx.AsyncClient) -> dict[str, int]:
    """Adapters that each replica has loaded so far."""
    return {name: int(count) for name, count in LOADS.findall((await client.get("/metrics")).text)}


async def ask(client: httpx.AsyncClient, name: str, number: int) -> str:
    body = {"model": name, "prompt": f"Once upon a time {number}", "max_tokens": 4, "seed": 1}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


async def ask_all(client: httpx.AsyncClient, names: Iterable[str]) -> None:
    """Each of them by as many requests at a time as reach all replicas."""
    for name in names:
        await asyncio.gather(*(ask(client, name, number) for number in range(8)))


async def until_loaded(client: httpx.AsyncClient, cluster: ForkedCluster) -> None:
    """Each replica has loaded an adapter, which no request has named."""
    async with asyncio.timeout(30):
        while {name for name, count in (await loads(client)).items() if count} != cluster.replicas.keys():
            await ask_all(client, [""])  # statistics come with steps


def test_a_pinned_adapter_is_resident_before_requests_and_after_a_replica_was_killed(tmp_path: Path):
    lora = {name: str(save_adapter(bundled_path("demo"), tmp_path / name, rank=4, seed=ord(name))) for name in "abc"}

    async def run() -> None:
        settings = {"lora": lora, "max_loras": 2, "pinned_loras": ["a"]}
        async with forked_cluster(tmp_path, model=settings) as cluster:
            await cluster.until_up()
            async with httpx.AsyncClient(base_url=f"http://{cluster.routers[0].http_address}", timeout=60) as client:
                await until_loaded(client, cluster)
                assert set((await loads(client)).values()) == {1}
                right = await ask(client, "a", 0)
                victim = next(iter(cluster.replicas.values()))
                await KILLED_REPLICA.strike(victim)
                await KILLED_REPLICA.mend(cluster, victim)
                await cluster.until_up()
                await until_loaded(client, cluster)
                await ask_all(client, "bcbc")
                before = await loads(client)
                assert max(before.values()) > 2, "they took turns in the other slot"
                assert await ask(client, "a", 0) == right
                await ask_all(client, "a")
                await ask_all(client, [""])
                assert await loads(client) == before, "it was there"

    loops.run(run(), timeout_s=280)

"""The demo on the cluster that is up: four prompts, and the same again while a replica is killed.

With a cluster of its own it is run in `tests/integration/test_commands.py`, in the long run.
"""

import asyncio
import re
from contextlib import contextmanager

import pytest

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.demo import run
from holdfast.cluster.serve.start_up import Serving
from tests.integration.processes import processes_named
from tests.integration.streams import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


async def both_are_up(address: str, before: list[object]) -> None:
    """The replica that was killed has been replaced."""
    async with AsyncClient(address) as client:

        async def are_up() -> bool:
            now = processes_named(":Replica")
            return len(now) == 2 and now != before and (await client.list_models()).models[0].num_replicas == 2

        await until(are_up, 180.0)


def test_it_streams_four_prompts_and_kills_a_replica(cluster: Serving, monkeypatch, capsys):
    before = processes_named(":Replica")

    @contextmanager
    def already_up(config, report):
        assert (config.cluster.replicas, config.parallel.tensor_parallel_size) == (2, 2), "as the cluster"
        yield cluster

    monkeypatch.setattr(run, "serving", already_up)
    assert run.main() == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^\[{number}\]", printed, re.MULTILINE) for number in (1, 2, 3, 4))
    assert "tokens/s" in printed
    assert "kill -9" in printed
    assert printed.count("identical") == 4
    asyncio.run(both_are_up(cluster.routers[0], before))

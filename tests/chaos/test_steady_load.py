"""A cluster as users run it, under steady load of every kind of request,
while its processes die and freeze one by one.
"""

import asyncio
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import psutil
import pytest

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.progress_bars import progress
from holdfast.cluster.serve.local import share_cores
from holdfast.cluster.serve.serving import serving
from holdfast.cluster.serve.start_up import Serving
from holdfast.worker.config import CacheConfig, ParallelConfig
from holdfast.worker.errors import ReplicaError
from holdfast.worker.wire.loopback import LOOPBACK
from tests import loops
from tests.chaos.kinds import KINDS
from tests.chaos.load import Load, steady_load
from tests.chaos.tally import Tally
from tests.integration.processes import listening_ports, processes_named, ray_processes, two_free_ports

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_CLIENTS = 8
NUM_REPLICAS = 3
MAX_TOKENS = 80
NUM_BLOCKS = 24
"""So few that replicas with several requests have to preempt all the time."""

NUM_RANDOM_FAULTS = 5
BACK_S = 150.0
CALM_S = 1.0
LOOK_S = 0.01


@dataclass(frozen=True)
class Fault:
    """A signal, and who gets it."""

    name: str
    number: signal.Signals
    choose: Callable[["Site"], Awaitable[psutil.Process]]
    takes_a_replica: bool = True


@dataclass
class Site:
    """The cluster and its load, on an event loop that outlives the tests."""

    loop: asyncio.Runner
    config: HoldfastConfig
    cluster: Serving
    load: Load

    async def until_up(self, at_least: int = NUM_REPLICAS) -> None:
        """Every router answers, and has so many replicas."""
        async with asyncio.timeout(BACK_S):
            for address in self.cluster.routers:
                async with AsyncClient(address) as client:
                    while await num_replicas(client) < at_least:
                        await asyncio.sleep(0.1)

    async def strike(self, fault: Fault, tally: Tally) -> None:
        """Does it under load; every answer that was open then, or was asked for later, is as without faults."""
        await self.until_up()
        await asyncio.sleep(CALM_S)
        await self.load.judge_all(tally.row("no fault"))
        row = tally.row(fault.name)
        victim = await fault.choose(self)
        struck = await self.load.under_way(NUM_CLIENTS // 2)
        struck_s = time.monotonic()
        victim.send_signal(fault.number)
        finding = asyncio.create_task(self.given_up()) if fault.takes_a_replica else None
        pauses_s = await self.load.settle(struck_s, struck)
        if finding is not None:
            row.found_s.append(await finding - struck_s)
        row.num_faults += 1
        row.pauses_s.append(max(pauses_s))
        await self.load.judge_all(row)
        assert row.is_clean, row.differences
        assert tally.row("no fault").is_clean, tally.row("no fault").differences

    async def given_up(self) -> float:
        """When a router has one replica less."""
        async with asyncio.timeout(BACK_S), AsyncClient(self.cluster.routers) as client:
            while len((await client.get_load()).replicas) == NUM_REPLICAS:
                await asyncio.sleep(LOOK_S)
        return time.monotonic()

    async def strike_at_random(self, seed: int, tally: Tally) -> None:
        """One fault after the other, also while earlier ones are being mended, as long as two replicas are up."""
        rng, row = random.Random(seed), tally.row("faults at random")
        await self.until_up()
        for _ in range(NUM_RANDOM_FAULTS):
            await self.until_up(at_least=2)
            fault = rng.choice(FAULTS)
            with suppress(psutil.NoSuchProcess):  # it may be gone since it was chosen
                (await fault.choose(self)).send_signal(fault.number)
                row.num_faults += 1
            await asyncio.sleep(rng.uniform(0.2, 3.0))
        await self.load.judge_all(row)
        assert row.is_clean, row.differences

    async def roll(self, tally: Tally) -> None:
        """Deploys the same application again, which replaces every router and replica in turn."""
        from ray import serve  # not before the cluster has been started: it closes Ray off only then

        from holdfast.cluster.serve import models
        from holdfast.cluster.serve.app import cluster_application

        await self.until_up()
        row, before = tally.row("rolling update"), processes_named(":Router") + processes_named(":Replica")
        config, name = share_cores(self.config), self.config.cluster.namespace
        target = serve.RunTarget(target=cluster_application(config, LOOPBACK), name=name, route_prefix=None)
        await asyncio.to_thread(serve.run_many, [target], wait_for_applications_running=False)
        await asyncio.to_thread(models.deploy, [config], name, await asyncio.to_thread(models.directory_of, name))
        async with asyncio.timeout(BACK_S):
            while any(process.is_running() for process in before):
                await asyncio.sleep(0.1)
        await self.until_up()
        row.num_faults += len(before)
        await self.load.judge_all(row)
        assert row.is_clean, row.differences

    async def until_memory_was_short(self) -> None:
        """Some of the replicas that are up had to preempt, as far as they have told."""
        async with asyncio.timeout(BACK_S), AsyncClient(self.cluster.routers) as client:
            while not any(replica.stats.num_preemptions for replica in (await client.get_load()).replicas):
                await asyncio.sleep(0.1)


async def num_replicas(client: AsyncClient) -> int:
    """As its router has it; 0 where there is no router."""
    try:
        return sum(model.num_replicas for model in (await client.list_models()).models)
    except ReplicaError:
        return 0


async def any_leader(site: Site) -> psutil.Process:
    return random.choice(processes_named(":Replica"))


async def any_rank(site: Site) -> psutil.Process:
    return random.choice(processes_named("RankActor"))


async def busiest_router(site: Site) -> psutil.Process:
    loads = {}
    for address in site.cluster.routers:
        async with AsyncClient(address) as client:
            loads[address] = (await client.get_load()).num_open
    port = int(max(loads, key=loads.__getitem__).rpartition(":")[2])
    (router,) = [process for process in processes_named(":Router") if port in listening_ports(process)]
    return router


FAULTS = (
    Fault("SIGKILL of a leader", signal.SIGKILL, any_leader),
    Fault("SIGKILL of a rank", signal.SIGKILL, any_rank),
    Fault("SIGKILL of a router", signal.SIGKILL, busiest_router, takes_a_replica=False),
    Fault("SIGSTOP of a rank", signal.SIGSTOP, any_rank),
    Fault("SIGSTOP of a router", signal.SIGSTOP, busiest_router, takes_a_replica=False),
    Fault("SIGSTOP of a leader", signal.SIGSTOP, any_leader),
)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    config = HoldfastConfig(
        cluster=ClusterConfig(replicas=NUM_REPLICAS, port=two_free_ports(), drain_timeout_s=5.0),
        parallel=ParallelConfig(tensor_parallel_size=2),
        cache=CacheConfig(num_blocks=NUM_BLOCKS),
    )
    on_sigterm = signal.getsignal(signal.SIGTERM)
    kinds = [kind.longer(MAX_TOKENS) for kind in KINDS if kind.may_meet_itself]
    with progress(sys.stderr) as report, loops.runner() as loop, serving(config, report) as cluster:
        loading = steady_load(cluster.routers, kinds, NUM_CLIENTS)
        yield Site(loop, config, cluster, loop.run(loading.__aenter__()))
        loop.run(loading.__aexit__(None, None, None))
        processes = ray_processes()
        for process in processes:
            process.resume()
    signal.signal(signal.SIGTERM, on_sigterm)
    assert psutil.wait_procs(processes, timeout=10)[1] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_no_stream_notices(site: Site, fault: Fault, tally: Tally):
    site.loop.run(site.strike(fault, tally))
    site.loop.run(site.until_memory_was_short())


def test_no_stream_notices_a_rolling_update(site: Site, tally: Tally):
    site.loop.run(site.roll(tally))


def test_no_stream_notices_faults_at_random(site: Site, tally: Tally):
    site.loop.run(site.strike_at_random(seed=1, tally=tally))

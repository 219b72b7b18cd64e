"""Routers whose event loops are held by what they read, in a cluster of Ray. One that spins for ever is ended and
replaced, and its request is refused from then on. One that is merely slow sheds, and is not ended. No stream loses a
token.
"""

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx2
import pytest

from holdfast import AsyncClient, SamplingParams
from holdfast.worker.errors import RequestQuarantinedError
from tests import loops
from tests.chaos.command import Served, served
from tests.chaos.kinds import KINDS
from tests.chaos.load import Load, steady_load
from tests.chaos.planted.sitecustomize import DRAGS, SPINS
from tests.chaos.tally import Row, Tally
from tests.integration.processes import two_free_ports

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(500)]

PLANTED = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "planted"), *sys.path])}
NUM_CLIENTS = 4
MAX_TOKENS = 200
ONE_TOKEN = SamplingParams(max_tokens=1)
BACK_S = 120.0
LIMIT_S = 450
POLL_S = 0.1
NUM_SLOW = 8
SLOW_S = 25.0

Fault = Callable[[Served], Awaitable[None]]


def routers(cluster: Served) -> set[int]:
    return {one.pid for one in cluster.named(":Router")}


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(BACK_S):
        while not is_so():
            await asyncio.sleep(POLL_S)


async def refused_for_good(addresses: tuple[str, ...]) -> None:
    async with AsyncClient(addresses, connect_s=BACK_S, draw=lambda: 0.0) as client:
        with pytest.raises(RequestQuarantinedError, match="router"):
            await client.generate(f"{SPINS} for ever", ONE_TOKEN)


async def spin_one(cluster: Served) -> None:
    await refused_for_good(cluster.routers)


async def strike(cluster: Served, load: Load, fault: Fault, row: Row) -> set[int]:
    """One fault while streams run. Returns the routers that it has ended, once others have taken their places."""
    await load.judge_all(Row())
    before = routers(cluster)
    assert len(before) == 2
    struck = await load.under_way(NUM_CLIENTS)
    struck_s = time.monotonic()
    row.num_faults += 1
    await asyncio.gather(fault(cluster), settled(load, struck_s, struck, row))
    await until(lambda: len(routers(cluster)) == 2)
    ended = before - routers(cluster)
    await load.judge_all(row)
    print(
        f"{fault.__name__}: {len(struck)} streams under way, {row.num_streams} judged, {row.num_lost} lost, "
        f"{row.num_mismatched} changed, {len(ended)} routers ended, longest pause {max(row.pauses_s):.2f} s"
    )
    assert row.is_clean, row.differences
    return ended


async def settled(load: Load, struck_s: float, struck: list, row: Row) -> None:
    row.pauses_s += await load.settle(struck_s, struck)


def test_streams_go_on_where_a_loop_spins_and_the_request_ends_one_router_alone(tally: Tally):
    async def run(cluster: Served) -> None:
        kinds = [kind.longer(MAX_TOKENS) for kind in KINDS if kind.may_meet_itself and not kind.is_whole]
        async with steady_load(cluster.routers, kinds, NUM_CLIENTS, connect_s=BACK_S) as load:
            ended = await strike(cluster, load, spin_one, tally.row("the loop of a router spins"))
            assert len(ended) == 1
            left = routers(cluster)
            for address in cluster.routers:  # also the one that was started later
                await refused_for_good((address,))
            assert routers(cluster) == left

    with served("--replicas", "2", environ=PLANTED, ports=(two_free_ports(), two_free_ports())) as cluster:
        loops.run(run(cluster), timeout_s=LIMIT_S)


async def slow_down(http: str) -> Counter[int]:
    """Clients that send slow requests to one router, each the next one when it is answered. Returns the statuses."""
    statuses = Counter[int]()
    over_s = time.monotonic() + SLOW_S

    async def ask(number: int) -> None:
        async with httpx2.AsyncClient(base_url=f"http://{http}", timeout=BACK_S) as client:
            while time.monotonic() < over_s:
                body = {"model": "demo", "prompt": f"{DRAGS} {number}", "max_tokens": 1}
                answer = await client.post("/v1/completions", json=body)
                statuses[answer.status_code] += 1
                if answer.status_code != 200:
                    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded"), answer.text
                    assert "overload.max_loop_delay_s" in answer.json()["error"]["message"]
                    await asyncio.sleep(POLL_S)

    await asyncio.gather(*map(ask, range(NUM_SLOW)))
    return statuses


def test_a_router_that_is_slow_on_what_it_reads_sheds_and_is_not_ended(tally: Tally):
    async def run(cluster: Served) -> None:
        met = Counter[int]()

        async def slow(cluster: Served) -> None:
            met.update(await slow_down(cluster.http[0]))

        kinds = [kind.longer(MAX_TOKENS) for kind in KINDS if kind.may_meet_itself and not kind.is_whole]
        async with steady_load(cluster.routers, kinds, NUM_CLIENTS, connect_s=BACK_S) as load:
            ended = await strike(cluster, load, slow, tally.row("a router reads slowly"))
        print(f"statuses of what was slow: {dict(met)}")
        assert not ended
        assert met.keys() == {200, 503}
        async with httpx2.AsyncClient(base_url=f"http://{cluster.http[0]}", timeout=BACK_S) as client:
            body = {"model": "demo", "prompt": "Hello", "max_tokens": 1}
            async with asyncio.timeout(BACK_S):
                while (await client.post("/v1/completions", json=body)).status_code != 200:
                    await asyncio.sleep(POLL_S)

    with served("--replicas", "2", environ=PLANTED) as cluster:
        loops.run(run(cluster), timeout_s=LIMIT_S)

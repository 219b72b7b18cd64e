"""What happens to the processes of a forked cluster, to whom, and how the next fault finds a whole cluster."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import psutil

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.worker.errors import HoldfastError
from tests.chaos.forked import UP_S, Forked, ForkedCluster, gone
from tests.chaos.paced import WORKSPACE_BYTES

Strike = Callable[[Forked], Awaitable[object]]
Choose = Callable[[ForkedCluster, Callable[[], bool]], Awaitable[Forked | None]]
Mend = Callable[[ForkedCluster, Forked], Awaitable[object]]

HOG_BYTES: Final = 2**20
"""Of a prompt. Messages above `limits.max_message_bytes` are refused before they take memory."""


@dataclass(frozen=True)
class Fault:
    """Made by the functions below."""

    name: str
    strike: Strike
    choose: Choose
    mend: Mend


def sending(number: signal.Signals) -> Strike:
    """A signal."""

    async def strike(victim: Forked) -> None:
        victim.send(number)

    return strike


async def starve(victim: Forked) -> None:
    """The system gives the process no more memory than it has. A step takes more (`paced.py`).

    What a step may hold at this moment is left out of the limit: given back, it would be enough for the next step.
    """
    process = psutil.Process(victim.pid)
    limit = process.memory_info().vms - WORKSPACE_BYTES
    process.rlimit(psutil.RLIMIT_AS, (limit, limit))


async def starve_second_rank(victim: Forked) -> None:
    await starve(victim.second_rank)


async def kill_second_rank(victim: Forked) -> None:
    victim.second_rank.send(signal.SIGKILL)


async def starve_with_a_hog(victim: Forked) -> None:
    """As above, and a router is sent a request that takes more."""
    await starve(victim)
    async with AsyncClient(victim.address, connect_s=0.1, reconnect_s=0.1) as hog:
        with suppress(HoldfastError):
            await hog.generate("word " * (HOG_BYTES // 5))


async def replace_replica(cluster: ForkedCluster, victim: Forked) -> None:
    victim.send(signal.SIGKILL)
    cluster.forget(victim)
    await cluster.add_replica()


async def replace_router(cluster: ForkedCluster, victim: Forked) -> None:
    victim.send(signal.SIGKILL)
    await cluster.replace_router(victim)


def once_it_is_gone(mend: Mend) -> Mend:
    """Of a process that has to end by itself: one that lingers is an internal error."""

    async def wait_and_mend(cluster: ForkedCluster, victim: Forked) -> None:
        async with asyncio.timeout(UP_S):
            await gone(victim)
            if victim.rank_pid:
                await gone(victim.second_rank)
        await mend(cluster, victim)

    return wait_and_mend


REPLICA = (ForkedCluster.serving_replica, replace_replica)
ROUTER = (ForkedCluster.serving_router, replace_router)
KILLED_REPLICA = Fault("SIGKILL of the replica", sending(signal.SIGKILL), *REPLICA)
FROZEN_REPLICA = Fault("SIGSTOP of the replica", sending(signal.SIGSTOP), *REPLICA)
KILLED_ROUTER = Fault("SIGKILL of the router", sending(signal.SIGKILL), *ROUTER)
FROZEN_ROUTER = Fault("SIGSTOP of the router", sending(signal.SIGSTOP), *ROUTER)
STARVED_REPLICA = Fault("out of memory in the replica", starve, REPLICA[0], once_it_is_gone(replace_replica))
KILLED_RANK = Fault("SIGKILL of a rank", kill_second_rank, REPLICA[0], once_it_is_gone(replace_replica))
STARVED_LEADER = replace(STARVED_REPLICA, name="out of memory in the leader")
STARVED_RANK = Fault("out of memory in a rank", starve_second_rank, REPLICA[0], once_it_is_gone(replace_replica))
STARVED_ROUTER = Fault("out of memory in the router", starve_with_a_hog, ROUTER[0], once_it_is_gone(replace_router))

"""Failover part of the demo: the same prompts once more, and the busiest replica is killed under them.

What may not live here: anything that helps the streams survive. They go on because routers and clients always do this.
"""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.demo.streams import Show, Stream, are_the_same, are_under_way, stream_all
from holdfast.worker.sampling_params import SamplingParams

AFTER_TOKENS: Final = 16
"""Of each stream that has not ended: then it happens."""


def pids_of(deployment: str, application: str) -> dict[str, int]:
    """The processes on this machine that a deployment's replicas, in Serve's sense, run in, by their ids.

    Needs a connection to Ray.
    """
    import ray
    from ray.util import list_named_actors

    prefix = f"SERVE_REPLICA::{application}#{deployment}#"
    actors = {
        named["name"].removeprefix(prefix): ray.get_actor(named["name"], named["namespace"])
        for named in list_named_actors(all_namespaces=True)
        if named["name"].startswith(prefix)
    }
    pids = ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in actors.values()])
    return dict(zip(actors, pids, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a killed replica has cost the streams."""

    pid: int
    at_s: float
    streams: list[Stream]

    def is_unseen(self, expected: Sequence[Stream]) -> bool:
        """Whether every stream is as the one of the same number that nobody disturbed."""
        return are_the_same(self.streams, expected)

    def table(self, expected: Sequence[Stream]) -> Table:
        """Each stream against the one that nobody disturbed."""
        return against(expected, self.streams, self.at_s, f"kill -9 {self.pid}")


def against(expected: Sequence[Stream], streams: Sequence[Stream], at_s: float, title: str) -> Table:
    """Streams beside those that nobody disturbed, with their longest pause since `at_s`."""
    table = Table("stream", "tokens", "longest pause", "against before", title=title)
    for stream, other in zip(streams, expected, strict=True):
        pause_s = stream.longest_pause_s(at_s)
        pause = "had ended" if pause_s is None else f"{1000 * pause_s:.0f} ms"
        verdict = "identical" if stream.is_same_as(other) else "DIFFERENT"
        table.add_row(str(stream.number), str(stream.num_tokens), pause, verdict)
    return table


async def stream_with_a_loss(
    routers: Sequence[str], pids: dict[str, int], prompts: Sequence[str], params: SamplingParams, show: Show
) -> Loss:
    """Streams all prompts, and kills the busiest replica when each stream is well under way."""
    killing: asyncio.Task[tuple[int, float]] | None = None

    def watch(streams: Sequence[Stream], grown: Stream) -> None:
        nonlocal killing
        show(streams, grown)
        if killing is None and are_under_way(streams, AFTER_TOKENS):
            killing = asyncio.create_task(_kill_the_busiest(routers, pids))

    streams = await stream_all(routers, prompts, params, watch)
    assert killing is not None, "the streams have ended without a token"
    pid, at_s = await killing
    return Loss(pid=pid, at_s=at_s, streams=streams)


async def _kill_the_busiest(routers: Sequence[str], pids: dict[str, int]) -> tuple[int, float]:
    """The process, and when that was."""
    pid = await busiest_replica(routers, pids)
    at_s = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    return pid, at_s


async def busiest_replica(routers: Sequence[str], pids: dict[str, int]) -> int:
    """Its process: one of `pids`, which are by replica id."""
    async with AsyncClient(routers) as client:
        loads = (await client.get_load()).replicas
    busiest = max((load for load in loads if load.replica_id in pids), key=lambda load: load.num_running)
    return pids[busiest.replica_id]

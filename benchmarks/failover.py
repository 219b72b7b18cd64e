"""Benchmark of failover: the pauses of streams when a replica or a router is killed or stopped, measured and plotted.

    python -m benchmarks.failover [--plot failover.png] [--prompts 8] [--tokens 160] [--port 50051]

Starts a cluster of two routers and two replicas of two ranks on this machine, streams the same prompts again and again,
and each time sends one process a signal when every stream is under way. Prints the pauses, and how many streams were
identical to those of a run without faults. Linux only: the processes are found by /proc.
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.demo.run import busiest_replica, pids_of
from holdfast.cluster.demo.streams import Stream, are_under_way, stream_all
from holdfast.cluster.progress_bars import progress
from holdfast.cluster.serve.app import REPLICA, ROUTER
from holdfast.cluster.serve.models import application_name
from holdfast.cluster.serve.serving import serving
from holdfast.cluster.serve.start_up import Serving
from holdfast.worker.config import ParallelConfig
from holdfast.worker.errors import ReplicaError
from holdfast.worker.sampling_params import SamplingParams

NUM_REPLICAS = 2
AFTER_TOKENS = 32
STARTS = ("Once upon a time", "The capital of France is", "The alphabet:", "A list of numbers:")


@dataclass(frozen=True)
class Fault:
    """A signal, and who gets it."""

    name: str
    number: signal.Signals
    find: Callable[[Serving, str], Coroutine[Any, Any, int]]
    """From the cluster and its application's name to a process."""


@dataclass(frozen=True)
class Outcome:
    """Streams that went through a fault."""

    name: str
    at_s: float
    streams: list[Stream]

    @property
    def pauses_s(self) -> list[float]:
        """The longest of each stream that had not ended."""
        pauses_s = [stream.longest_pause_s(self.at_s) for stream in self.streams]
        return [pause_s for pause_s in pauses_s if pause_s is not None]

    def num_identical(self, undisturbed: Sequence[Stream]) -> int:
        return sum(one.is_same_as(other) for one, other in zip(self.streams, undisturbed, strict=True))


def checked(outcome: Outcome) -> Outcome:
    """A stream that had ended when it happened measures nothing: the measurement ends."""
    num_struck, num_streams = len(outcome.pauses_s), len(outcome.streams)
    if num_struck < num_streams:
        message = f"{num_streams - num_struck} of {num_streams} streams had ended before it happened"
        raise SystemExit(f"{outcome.name}: {message}: ask for more tokens (--tokens)")
    return outcome


async def a_leader(cluster: Serving, application: str) -> int:
    of_model = application_name(application, cluster.models[0])
    return await busiest_replica(cluster.routers, await asyncio.to_thread(pids_of, REPLICA, of_model))


async def a_router(cluster: Serving, application: str) -> int:
    """The router that has the streams."""
    num_open = {}
    for address in cluster.routers:
        async with AsyncClient(address) as client:
            num_open[address] = (await client.get_load()).num_open
    port = int(max(num_open, key=num_open.__getitem__).rpartition(":")[2])
    pids = (await asyncio.to_thread(pids_of, ROUTER, application)).values()
    (pid,) = [pid for pid in pids if port in _listening_ports(pid)]
    return pid


FAULTS = (
    Fault("SIGKILL of a replica", signal.SIGKILL, a_leader),
    Fault("SIGKILL of a router", signal.SIGKILL, a_router),
    Fault("SIGSTOP of a replica", signal.SIGSTOP, a_leader),
    Fault("SIGSTOP of a router", signal.SIGSTOP, a_router),
)


async def strike(
    cluster: Serving, application: str, fault: Fault, prompts: Sequence[str], params: SamplingParams
) -> Outcome:
    """Streams all prompts; when each has come to `AFTER_TOKENS` tokens, or to its end, it happens."""
    victim: asyncio.Task[int] | None = None
    struck_s: float | None = None

    def watch(streams: Sequence[Stream], grown: Stream) -> None:
        nonlocal victim, struck_s
        if victim is None and are_under_way(streams, AFTER_TOKENS // 2):
            victim = asyncio.create_task(fault.find(cluster, application))
        if struck_s is None and are_under_way(streams, AFTER_TOKENS) and victim is not None and victim.done():
            struck_s = time.perf_counter()
            os.kill(victim.result(), fault.number)

    streams = await stream_all(cluster.routers, prompts, params, watch)
    assert struck_s is not None, "the streams ended before it happened: ask for more tokens"
    return checked(Outcome(fault.name, struck_s, streams))


async def until_whole(cluster: Serving) -> None:
    """Waits until every router answers and is linked to all replicas."""
    for address in cluster.routers:
        async with AsyncClient(address) as client:
            while await _num_replicas(client) < NUM_REPLICAS:
                await asyncio.sleep(0.2)


def report(outcomes: Sequence[Outcome], undisturbed: Sequence[Stream]) -> Table:
    table = Table("fault", "streams", "identical", "median pause", "longest", box=None)
    for outcome in outcomes:
        pauses_ms = [1000 * pause_s for pause_s in outcome.pauses_s]
        counts = (str(len(outcome.streams)), str(outcome.num_identical(undisturbed)))
        table.add_row(outcome.name, *counts, f"{statistics.median(pauses_ms):.0f} ms", f"{max(pauses_ms):.0f} ms")
    return table


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """A line for each stream and a tick for each token, around the moment of each fault."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.1 * len(outcomes) + 1), layout="constrained")
    panels = figure.subplots(len(outcomes), 1, sharex=True, squeeze=False)[:, 0]
    for panel, outcome in zip(panels, outcomes, strict=True):
        times_s = [[at_s - outcome.at_s for at_s in stream.token_times_s] for stream in outcome.streams]
        panel.eventplot(times_s, linelengths=0.7, linewidths=0.6, colors="tab:blue")
        panel.axvline(0, color="tab:red")
        panel.set_ylabel(outcome.name.replace(" of ", "\nof "), rotation=0, ha="right", va="center")
        panel.set(yticks=[], xlim=(-0.6, 4))
    panels[-1].set_xlabel("seconds since the signal; a line is a stream, a tick is a token that has come")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="write a .png or .svg here (pip install 'holdfast[plot]')")
    parser.add_argument("--port", type=int, default=50051, help="of the first router; the second has the next one")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160)
    args = parser.parse_args()
    prompts = [STARTS[number % len(STARTS)] + " " * (number // len(STARTS)) for number in range(args.prompts)]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=args.tokens, ignore_eos=True)
    # Ports of its own choice would be others after a router was replaced.
    cluster_config = ClusterConfig(replicas=NUM_REPLICAS, port=args.port)
    config = HoldfastConfig(cluster=cluster_config, parallel=ParallelConfig(tensor_parallel_size=2))
    # On stdout Ray has a paragraph for every death, which would spoil the bars.
    with progress(sys.stderr) as say, serving(config, say) as cluster, redirect_stdout(StringIO()):
        undisturbed = asyncio.run(stream_all(cluster.routers, prompts, params, lambda streams, grown: None))
        outcomes = []
        for number, fault in enumerate(FAULTS):
            say("faults", number, len(FAULTS))
            outcomes.append(asyncio.run(strike(cluster, config.cluster.namespace, fault, prompts, params)))
            asyncio.run(until_whole(cluster))
        say("faults", len(FAULTS), len(FAULTS))
    Console().print(report(outcomes, undisturbed))
    if args.plot is not None:
        draw(outcomes, args.plot)


async def _num_replicas(client: AsyncClient) -> int:
    try:
        return sum(model.num_replicas for model in (await client.list_models()).models)
    except ReplicaError:
        return 0


def _listening_ports(pid: int) -> set[int]:
    connections = psutil.Process(pid).net_connections("tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


if __name__ == "__main__":
    main()

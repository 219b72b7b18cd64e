"""The demo: a local cluster, four prompts streamed at once over gRPC, and the same again while a replica is killed.

`make demo`, `holdfast demo` and `python -m holdfast.cluster.demo.run` are the same.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from typing import Final

from rich.console import Console
from rich.table import Table

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.demo.streams import Show, Stream, are_the_same, are_under_way, display, figures, stream_all
from holdfast.cluster.progress_bars import progress
from holdfast.cluster.serve.app import REPLICA
from holdfast.cluster.serve.models import application_name
from holdfast.cluster.serve.reaper import descendants
from holdfast.cluster.serve.serving import serving
from holdfast.worker.config import ParallelConfig
from holdfast.worker.errors import ReplicaError
from holdfast.worker.sampling_params import SamplingParams

PROMPTS: Final = ("The capital of France is", "The months of the year are", "The alphabet:", "Once upon a time")
PARAMS: Final = SamplingParams(temperature=0.0, max_tokens=96)


def main() -> int:
    """Runs the demo; 1 if the loss of a replica has changed a stream. Raises what `serving` and the client raise."""
    started_s = time.monotonic()
    config = HoldfastConfig(cluster=ClusterConfig(replicas=2, port=0), parallel=ParallelConfig(tensor_parallel_size=2))
    console = Console(file=sys.stdout)  # this very one, whatever becomes of the name below
    with ExitStack() as stack:
        with progress(sys.stderr) as report:
            cluster = stack.enter_context(serving(config, report))
        addresses = " and ".join(cluster.routers)
        console.print(f"up after {time.monotonic() - started_s:.1f} s, gRPC on {addresses}\n", highlight=False)
        with display(console) as show:
            streams = asyncio.run(stream_all(cluster.routers, PROMPTS, PARAMS, show))
        console.print(figures(streams))
        pids = pids_of(REPLICA, application_name(config.cluster.namespace, config.model.name))
        console.print("\nonce more, and on the way a replica is killed\n")
        with redirect_stdout(StringIO()), display(console) as show:  # Ray prints a paragraph about the death
            loss = asyncio.run(stream_with_a_loss(cluster.routers, pids, PROMPTS, PARAMS, show))
        console.print(loss.table(streams))
    console.print(f"stopped; {time.monotonic() - started_s:.1f} s in all", highlight=False)
    return 0 if loss.is_unseen(streams) else 1


AFTER_TOKENS: Final = 16
"""Tokens of each unfinished stream after which the fault happens."""


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
    """Effects of a killed replica on the streams."""

    pid: int
    at_s: float
    streams: list[Stream]

    def is_unseen(self, expected: Sequence[Stream]) -> bool:
        """Whether every stream is as the one of the same number of the undisturbed run."""
        return are_the_same(self.streams, expected)

    def table(self, expected: Sequence[Stream]) -> Table:
        """Each stream against the one of the undisturbed run."""
        return against(expected, self.streams, self.at_s, f"kill -9 {self.pid}")


def against(expected: Sequence[Stream], streams: Sequence[Stream], at_s: float, title: str) -> Table:
    """Streams beside those of the undisturbed run, with their longest pause since `at_s`."""
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
    """Process id of the busiest replica: one of `pids`, which is keyed by replica id."""
    async with AsyncClient(routers) as client:
        loads = (await client.get_load()).replicas
    busiest = max((load for load in loads if load.replica_id in pids), key=lambda load: load.num_running)
    return pids[busiest.replica_id]


NUM_ROUTERS: Final = 2
READY: Final = "ready after"


class ServedCluster:
    """A `holdfast serve` at addresses that stay the same from one life to the next."""

    def __init__(self, *arguments: str) -> None:
        ports = [_free_ports(NUM_ROUTERS) for _ in range(2)]
        self.routers = tuple(f"127.0.0.1:{ports[0] + number}" for number in range(NUM_ROUTERS))
        settings = ("--routers", str(NUM_ROUTERS), "--port", str(ports[0]), "--http-port", str(ports[1]))
        self._command = (sys.executable, "-m", "holdfast.cluster.commands.cli", "serve", *settings, *arguments)
        self._process: subprocess.Popen[str] | None = None

    def start(self, *, is_quiet: bool) -> None:
        """Returns when it is up. Raises `ReplicaError` if it ends before."""
        progress = subprocess.DEVNULL if is_quiet else None
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=progress, text=True)
        assert self._process.stdout is not None
        if not any(line.startswith(READY) for line in self._process.stdout):
            raise ReplicaError(f"holdfast serve has ended with exit code {self._process.wait()}")

    def kill(self) -> int:
        """SIGKILL to it and to every process below. Returns their number."""
        assert self._process is not None, "it is started first"
        pids = [self._process.pid, *descendants(self._process.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.communicate()
        return len(pids)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.communicate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Blackout:
    """Effects on the streams when all processes end."""

    num_killed: int
    at_s: float
    dark_s: float
    """Until the cluster was up again."""
    streams: list[Stream]

    def is_unseen(self, expected: Sequence[Stream]) -> bool:
        """Whether every stream is as the one of the same number of the undisturbed run."""
        return are_the_same(self.streams, expected)

    def table(self, expected: Sequence[Stream]) -> Table:
        """Each stream against the one of the undisturbed run."""
        title = f"kill -9 of all {self.num_killed} processes; up again after {self.dark_s:.1f} s"
        return against(expected, self.streams, self.at_s, title)


async def stream_through_a_blackout(
    cluster: ServedCluster, prompts: Sequence[str], params: SamplingParams, show: Show
) -> Blackout:
    """Streams all prompts, and kills the whole cluster when each stream is well under way."""
    restarting: asyncio.Task[tuple[int, float, float]] | None = None

    def watch(streams: Sequence[Stream], grown: Stream) -> None:
        nonlocal restarting
        show(streams, grown)
        if restarting is None and are_under_way(streams, AFTER_TOKENS):
            killed = cluster.kill(), time.perf_counter()  # here and now, before another token arrives
            restarting = asyncio.create_task(_restart(cluster, *killed))

    streams = await stream_all(cluster.routers, prompts, params, watch)
    assert restarting is not None, "the streams have ended without a token"
    num_killed, at_s, dark_s = await restarting
    return Blackout(num_killed=num_killed, at_s=at_s, dark_s=dark_s, streams=streams)


async def _restart(cluster: ServedCluster, num_killed: int, at_s: float) -> tuple[int, float, float]:
    await asyncio.to_thread(cluster.start, is_quiet=True)
    return num_killed, at_s, time.perf_counter() - at_s


def run(prompts: Sequence[str], params: SamplingParams) -> int:
    """Runs the demo with a blackout; 1 if it has changed a stream."""
    console = Console(file=sys.stdout)
    started_s = time.monotonic()
    with _running() as cluster:
        console.print(f"up after {time.monotonic() - started_s:.1f} s, gRPC on {' and '.join(cluster.routers)}\n")
        with display(console) as show:
            expected = asyncio.run(stream_all(cluster.routers, prompts, params, show))
        console.print(figures(expected))
        console.print("\nonce more, and on the way every process of the cluster is killed\n")
        with display(console) as show:
            blackout = asyncio.run(stream_through_a_blackout(cluster, prompts, params, show))
        console.print(blackout.table(expected))
    console.print(f"stopped; {time.monotonic() - started_s:.1f} s in all", highlight=False)
    return 0 if blackout.is_unseen(expected) else 1


@contextmanager
def _running() -> Iterator[ServedCluster]:
    cluster = ServedCluster("--replicas", "2", "--tp", "2")
    with ExitStack() as stack:
        stack.callback(cluster.stop)
        cluster.start(is_quiet=False)
        yield cluster


def _free_ports(number: int) -> int:
    """The first of this many consecutive ports that are free now."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            with suppress(OSError, OverflowError):
                for port in range(first + 1, first + number):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
                return int(first)


if __name__ == "__main__":
    sys.exit(main())

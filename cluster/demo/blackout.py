"""Blackout part of the demo: every process of a cluster is killed under the streams, and the cluster is started again.

The cluster is a `holdfast serve` as anyone runs it, at fixed addresses. What may not live here: anything that helps the
streams survive. They go on because clients wait and resume.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from holdfast.cluster.demo.display import display, figures
from holdfast.cluster.demo.loss import AFTER_TOKENS, against
from holdfast.cluster.demo.streams import Show, Stream, are_the_same, are_under_way, stream_all
from holdfast.cluster.serve.reaper import descendants
from holdfast.worker.errors import ReplicaError
from holdfast.worker.sampling_params import SamplingParams

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
        """SIGKILL to it and to every process below. Returns how many that were."""
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
    """What the end of all processes has cost the streams."""

    num_killed: int
    at_s: float
    dark_s: float
    """Until the cluster was up again."""
    streams: list[Stream]

    def is_unseen(self, expected: Sequence[Stream]) -> bool:
        """Whether every stream is as the one of the same number that nobody disturbed."""
        return are_the_same(self.streams, expected)

    def table(self, expected: Sequence[Stream]) -> Table:
        """Each stream against the one that nobody disturbed."""
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
    """The first of so many ports in a row that are free now."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            with suppress(OSError, OverflowError):
                for port in range(first + 1, first + number):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
                return int(first)

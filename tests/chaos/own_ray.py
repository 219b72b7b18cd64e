"""`holdfast serve` under a steady load, and the faults of the Ray that it runs for itself."""

import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import psutil

from tests.chaos.ray_nodes import Site, loaded
from tests.chaos.tally import Row
from tests.integration.processes import two_free_ports
from tests.integration.test_commands import Command

NUM_CLIENTS: Final = 4
NUM_REPLICAS: Final = 2
LIMIT_S: Final = 120.0
HOLD_S: Final = 3.0
"""How long the load goes on after a fault at least, so that requests begin while what was struck is away."""

GCS: Final = "gcs/gcs_server"
RAYLET: Final = "raylet/raylet"
CONTROLLER: Final = "ray::ServeController"
DIRECTORY: Final = ":Directory"
ROUTER: Final = ":Router"
REPLICA: Final = ":Replica"
"""Words of a process's command line."""

Do = Callable[[], object]


@dataclass
class Effect:
    """What a fault was for those who use the cluster."""

    row: Row
    before: set[int]
    """The processes of routers and replicas."""
    after: set[int]
    seconds: float
    """Until a successor was there."""
    quiet_s: list[float] = field(default_factory=list)
    """The longest pauses of streams during a time as long, right before the fault."""


class OwnRay:
    """A running cluster of one machine and its load."""

    def __init__(self, command: Command, site: Site) -> None:
        self.command, self.site = command, site

    def processes(self, word: str) -> list[psutil.Process]:
        return [one for one in self.command.descendants() if word in _command_line(one)]

    def one(self, word: str) -> psutil.Process:
        (found,) = self.processes(word)
        return found

    def data_plane(self) -> set[int]:
        """The processes that streams run through."""
        return {one.pid for word in (ROUTER, REPLICA) for one in self.processes(word)}

    def kill(self, word: str) -> psutil.Process:
        """SIGKILL. Returns the one that takes its place, once it is there."""
        lost = self.one(word)
        lost.kill()
        return self.successor(word, lost)

    def kill_fork_server(self) -> None:
        """SIGKILL. It has no successor: workers that start later are started by Ray."""
        server = self.processes(ROUTER)[0].parent()
        assert server is not None
        server.kill()

    def successor(self, word: str, lost: psutil.Process) -> psutil.Process:
        limit_s = time.monotonic() + LIMIT_S
        while not (found := [one for one in self.processes(word) if one.pid != lost.pid]):
            assert time.monotonic() < limit_s, f"nothing has taken the place of {word}"
            select.select([], [], [], 0.02)
        return found[0]

    def hang(self, word: str) -> psutil.Process:
        """SIGSTOP. Returns the one that takes its place."""
        lost = self.one(word)
        lost.send_signal(signal.SIGSTOP)
        return self.successor(word, lost)

    def strike(self, *faults: Do) -> Effect:
        """One fault after the other, each while streams run: those and all that begin meanwhile are judged."""
        site, row = self.site, Row(num_faults=len(faults))
        quiet_s = self._pauses(HOLD_S)
        site.do(site.load.judge_all(Row()))
        before, began_s = self.data_plane(), time.monotonic()
        for fault in faults:
            struck = site.do(site.load.under_way(NUM_CLIENTS - 1))
            struck_s = time.monotonic()
            fault()
            row.pauses_s += site.do(site.load.settle(struck_s, struck))
        seconds = time.monotonic() - began_s
        row.pauses_s += self._pauses(HOLD_S)
        site.do(site.load.under_way(NUM_CLIENTS - 1))  # of those that have begun since
        site.do(site.load.judge_all(row))
        return Effect(row, before, self.data_plane(), seconds, quiet_s)

    def replaces_a_replica(self) -> float:
        """Seconds from the loss of a replica until another serves in its place."""
        site = self.site
        self.until_whole()
        began_s = time.monotonic()
        self.processes(REPLICA)[0].kill()
        site.until(lambda load: len(load.replicas) == NUM_REPLICAS - 1)
        self.until_whole()
        return time.monotonic() - began_s

    def until_whole(self) -> None:
        self.site.until(lambda load: len(load.replicas) == NUM_REPLICAS)

    def _pauses(self, seconds: float) -> list[float]:
        """Of the streams of the next seconds."""
        pauses_s: list[float] = []
        end_s = time.monotonic() + seconds
        while (now_s := time.monotonic()) < end_s:
            self.site.do(self.site.load.under_way(1))
            pauses_s += self.site.do(self.site.load.settle(now_s))
        return pauses_s


@contextmanager
def own_ray() -> Iterator[OwnRay]:
    """`holdfast serve` with two routers and two replicas, on loopback."""
    port, http_port = two_free_ports(), two_free_ports()
    command = Command(
        *("holdfast.cluster.commands.cli", "serve", "--replicas", str(NUM_REPLICAS), "--num-threads", "1"),
        *("--host", "127.0.0.1", "--port", str(port), "--http-port", str(http_port)),
    )
    try:
        addresses = tuple(re.findall(r"[\w.]+:\d+", command.wait_for(r"gRPC on (.*)").group(1)))
        with loaded(None, addresses, connect_s=LIMIT_S) as site:  # type: ignore[arg-type]  # no nodes are added
            yield OwnRay(command, site)
    finally:
        command.process.terminate()
        try:
            command.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            command.process.kill()


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def shown(name: str, effect: Effect) -> str:
    def longest(pauses_s: Any) -> str:
        return f"{max(pauses_s):.2f}" if pauses_s else "-"

    return (
        f"{name}: {effect.row.num_streams} streams, longest pause {longest(effect.row.pauses_s)} s "
        f"(before: {longest(effect.quiet_s)} s), successors after {effect.seconds:.1f} s"
    )

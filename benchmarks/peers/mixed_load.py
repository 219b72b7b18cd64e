"""Case g: a mixed open-loop load through each server, ours by gRPC and others by HTTP, at the same rates.

    python -m benchmarks.peers.mixed_load [--model S] [--peers vllm-http] [--seconds 30] [--out g.json]

Each server's capacity is what a closed loop gets out of it. Then `holdfast bench` sends the same arrivals and lengths
to one server after the other, at 0.5, 0.8 and 1.0 of the slower one's capacity, and searches the highest rate of each
that is within the SLO.
"""

import argparse
import datetime
import json
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.folders import Folders
from benchmarks.peers.install import prepare
from benchmarks.peers.launch import reason_to_leave_out, start
from benchmarks.peers.machine import NoiseWatch, describe_machine, settle
from benchmarks.peers.peers import ENVIRONMENTS, PEERS, Peer, chosen_peers
from benchmarks.peers.server import Server, ServerError
from benchmarks.peers.tables import Sheet
from holdfast.cluster.bench.report import Report, Run, read_report

OURS: Final = "holdfast-http"
SHARES: Final = (0.5, 0.8, 1.0)
SLO: Final = "ttft=500ms,tpot=50ms"
MIX: Final = ("--prompt-tokens", "uniform:32:512", "--output-tokens", "uniform:16:96")
_USERS: Final = 32
"""Of the closed loop that finds a server's capacity."""
_NOISE: Final = 0.06
_SETTLE_S: Final = 10.0


@dataclass(slots=True)
class Load:
    """What one load saw of one server."""

    run: Run
    others: float
    """Share of the machine that other processes took meanwhile."""


@dataclass(slots=True)
class Served:
    """All that one server showed."""

    capacity: float = 0.0
    """Requests a second of a closed loop."""
    by_share: dict[float, Load] = field(default_factory=dict)
    best_rate: float | None = None
    """The highest rate within the SLO; None: none was."""


class Bench:
    """`holdfast bench` on one server after the other. All are paused but the one that is asked."""

    def __init__(self, servers: Mapping[str, Server], seconds: float, say: Callable[[str], None]) -> None:
        self._servers, self._seconds, self._say = servers, seconds, say

    def capacity(self, name: str) -> float:
        run = self._asked(name, "--concurrency", str(_USERS), *self._duration()).run
        self._say(f"{name}: capacity {run.requests_per_s:.2f} requests/s")
        return run.requests_per_s

    def at(self, name: str, rate: float) -> Load:
        load = self._asked(name, "--rate", f"{rate:.4f}", *self._duration())
        self._say(f"{name}: {rate:.2f} requests/s: {load.run.completed} of {load.run.requests} answered")
        return load

    def best_rate(self, name: str, start: float) -> float | None:
        search = ("--find-max", "--slo", SLO, "--rate", f"{start:.4f}", "--max-tries", "8")
        report, _ = self._report(name, *search, *self._duration())
        assert report.search is not None
        self._say(f"{name}: within {SLO} up to {report.search.best} requests/s")
        return report.search.best

    def _duration(self) -> tuple[str, str]:
        return "--duration", str(self._seconds)

    def _asked(self, name: str, *flags: str) -> Load:
        report, others = self._report(name, *flags)
        return Load(report.runs[0], others)

    def _report(self, name: str, *flags: str) -> tuple[Report, float]:
        server = self._servers[name]
        api = server.apis.get("grpc", server.apis.get("http", ""))
        settle(_NOISE, _SETTLE_S)
        with server.running(), tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "report.json"
            command = [sys.executable, "-m", "holdfast.cluster.commands.cli", "bench", "--server", api, *MIX, *flags]
            watch = NoiseWatch(server.group)
            ended = subprocess.run([*command, "--warmup", "8", "--json", out], capture_output=True, text=True)
            if not out.exists():
                raise ServerError(name, f"the load failed ({ended.returncode}): {ended.stderr[-2000:]}")
            return read_report(out), watch.usage().others


@contextmanager
def opened(peers: Sequence[Peer], model: str, folders: Folders) -> Iterator[dict[str, Server]]:
    """All servers, started one after the other, and paused. Raises `ServerError` for one that does not start."""
    servers: dict[str, Server] = {}
    try:
        for peer in peers:
            if reason := reason_to_leave_out(peer, folders, model):
                raise ServerError(peer.name, reason)
            prepare([model], ENVIRONMENTS.get(peer.environment), folders)
            servers[peer.name] = start(peer, folders, model, {}, folders.log(f"{peer.name}-{model}"))
            servers[peer.name].await_ready()
            servers[peer.name].pause()
        yield servers
    finally:
        for server in servers.values():
            server.close()


def measured(bench: Bench, names: Sequence[str], shares: Sequence[float] = SHARES) -> dict[str, Served]:
    """Every server at every rate, by turns."""
    found = {name: Served(capacity=bench.capacity(name)) for name in names}
    base = min(served.capacity for served in found.values())
    for share in shares:
        for name, served in found.items():
            served.by_share[share] = bench.at(name, share * base)
    for name, served in found.items():
        served.best_rate = bench.best_rate(name, base / 2)
    return found


def latency_sheet(found: Mapping[str, Served]) -> Sheet:
    """Latencies at each share of the slower one's capacity."""
    base = min(served.capacity for served in found.values())
    rows = []
    for share in next(iter(found.values())).by_share:
        for name, served in found.items():
            load = served.by_share[share]
            rows.append([f"{share:g}: {share * base:.2f}/s", name, *_latencies(load), f"{load.others:.0%}"])
    columns = ["load", "server", "TTFT p50", "p99", "TPOT p50", "p99", "failed", "others took"]
    return Sheet("Mixed open-loop load, milliseconds", columns, rows)


def _latencies(load: Load) -> list[str]:
    cells = []
    for one in (load.run.ttft_s, load.run.tpot_s):
        cells += ["", ""] if one is None else [f"{one.p50 * 1000:.0f}", f"{one.p99 * 1000:.0f}"]
    return [*cells, str(load.run.failed)]


def capacity_sheet(found: Mapping[str, Served]) -> Sheet:
    rows = [
        [name, f"{served.capacity:.2f}", "none" if served.best_rate is None else f"{served.best_rate:.2f}"]
        for name, served in found.items()
    ]
    return Sheet("Capacity, requests/s", ["server", f"closed loop of {_USERS}", f"within {SLO}"], rows)


def facts(found: Mapping[str, Served], model: str) -> dict[str, Any]:
    """For the JSON file: every figure but the single requests."""
    left_out = {"each_request", "timeline"}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.peers.mixed_load", *sys.argv[1:]]),
        "machine": describe_machine(),
        "model": model,
        "servers": {
            name: {
                "capacity": served.capacity,
                "best_rate": served.best_rate,
                "by_share": {
                    str(share): {"others": load.others, "run": load.run.model_dump(exclude=left_out)}
                    for share, load in served.by_share.items()
                },
            }
            for name, served in found.items()
        },
    }


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # the servers are ended on the way out
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="S", choices=("S", "M"))
    parser.add_argument("--peers", type=chosen_peers, default="vllm-http", help="servers on a network, beside ours")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--folder", type=Path, default=Folders().root)
    options = parser.parse_args()
    if offline := [peer.name for peer in options.peers if not peer.serves]:
        parser.error(f"peers: {', '.join(offline)}: not a server on a network")
    peers = [PEERS[OURS], *options.peers]
    with opened(peers, options.model, Folders(options.folder)) as servers:
        found = measured(Bench(servers, options.seconds, lambda text: print(text, flush=True)), list(servers))
    for sheet in (latency_sheet(found), capacity_sheet(found)):
        print(sheet.markdown())
    if options.out is not None:
        options.out.write_text(json.dumps(facts(found, options.model), indent=1))


if __name__ == "__main__":
    main()

"""Soak of whole clusters: hours of mixed load, with each process's memory and each repeated answer looked at.

    python -m benchmarks.soak [--minutes 60] [--clusters 2] [--clients 3] [--pause-s 0.3] [--json FILE] [--plot FILE]

Each cluster is a `holdfast serve` of its own, on free ports of loopback; two on one machine must not meet. Clients draw
requests from a seed (`benchmarks/memory.py`: no two alike, some cancelled, some with schemas) and repeat one of a few
fixed requests now and then, whose answer must stay equal to the first in every token. The first cluster runs with the
default KV cache, which takes memory when a block is first used (`--default-kv-clusters 0`: none does); the others with
a cache of `--kv-cache-memory`, which a replica takes while it is idle after its start. Printed: memory by process, the
requests, lost and changed answers, the highest pressures of the routers and what their overload managers did, and how
much each kind of process grew in the second half of the time. What grows there by as much as in the first is a leak;
what grows in the first cluster alone is the KV cache.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from benchmarks.idle_cluster import kind_of
from benchmarks.memory import odd_params
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.worker.errors import HoldfastError
from holdfast.worker.sampling_params import SamplingParams

MB: Final = 2**20
LOOK_S: Final = 1.0
OVERLOAD: Final = re.compile(
    r'^holdfast_overload_(pressure_ratio|action_active|actions_total)\{\w+="(\w+)"\} (\S+)$', re.MULTILINE
)
STOP_LIMIT_S: Final = 120
REPEATED: Final = (
    ("The capital of France is", SamplingParams(temperature=0.0, max_tokens=24)),
    ("Once upon a time", SamplingParams(temperature=0.9, seed=7, max_tokens=48)),
    ("Monday, Tuesday,", SamplingParams(temperature=0.8, seed=5, n=2, max_tokens=16)),
)


@dataclass
class Cluster:
    """One `holdfast serve`, and what came of its requests."""

    name: str
    process: "subprocess.Popen[str]"
    addresses: list[str]
    http: list[str]
    first: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    errors: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    pressures: dict[str, float] = field(default_factory=dict)
    """The highest of any router, by resource."""
    actions: dict[str, int] = field(default_factory=dict)
    """What overload managers have done, or had on, when somebody looked; of all routers."""
    starved_s: float = 0.0
    """How long routers waited for a core between the look that found the highest loop delay, and the one before."""


@contextmanager
def started(name: str, flags: list[str]) -> Iterator[Cluster]:
    command = [sys.executable, "-m", "holdfast", "serve", "--port", "0", "--http-port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None, "it is a pipe"
        lines = [next((line for line in process.stdout if line.startswith(start)), "") for start in ("ready", "HTTP")]
        if not all(lines):
            raise RuntimeError(f"cluster {name} did not start")
        grpc, http = (re.findall(r"127\.0\.0\.1:\d+", line) for line in lines)
        yield Cluster(name, process, grpc, http)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_LIMIT_S)


async def ask(cluster: Cluster, client: AsyncClient, draw: random.Random) -> None:
    """One request: odd, or one of those that are repeated."""
    if draw.random() < 0.3:
        index = draw.randrange(len(REPEATED))
        prompt, params = REPEATED[index]
        answer = await client.generate(prompt, params)
        tokens = [tuple(one.token_ids) for one in answer.completions]
        cluster.counts["repeated"] += 1
        cluster.counts["changed"] += tokens != cluster.first.setdefault(index, tokens)
        return
    letters = (draw.choice((draw.randint(32, 126), draw.randint(32, 0x2FFF))) for _ in range(draw.choice((1, 40, 200))))
    chunks = client.stream("".join(map(chr, letters)), odd_params(draw), tenant=f"t{draw.getrandbits(30)}")
    cluster.counts["odd"] += 1
    async for _ in chunks:
        if draw.random() < 0.02:
            cluster.counts["cancelled"] += 1
            break
    await chunks.aclose()


async def one_client(cluster: Cluster, number: int, pause_s: float, until_s: float) -> None:
    draw = random.Random(f"{cluster.name} {number}")
    async with AsyncClient(cluster.addresses) as client:
        while time.monotonic() < until_s:
            try:
                await ask(cluster, client, draw)
            except HoldfastError as error:
                is_refused = isinstance(error, ValueError)
                cluster.counts["refused" if is_refused else "lost"] += 1
                cluster.errors[type(error).__name__ + ": " + str(error)[:80]] += 1
            await asyncio.sleep(draw.uniform(0, 2 * pause_s))


def core_wait_s(cluster: Cluster) -> float:
    """How long the threads of its routers have waited for a core so far: the longest of each router, added up."""
    root, total_ns = psutil.Process(cluster.process.pid), 0
    for process in root.children(recursive=True):
        with suppress(psutil.Error, OSError):
            if kind_of(process, root.pid) == "Router":
                tasks = Path(f"/proc/{process.pid}/task").iterdir()
                total_ns += max(int((task / "schedstat").read_text().split()[1]) for task in tasks)
    return total_ns / 1e9


async def watch_overload(cluster: Cluster, until_s: float) -> None:
    """Looks at the routers' overload managers."""
    waited_s = core_wait_s(cluster)
    async with httpx.AsyncClient() as client:
        while time.monotonic() < until_s:
            waited_before_s, waited_s = waited_s, core_wait_s(cluster)
            actions: dict[str, int] = defaultdict(int)
            for address in cluster.http:
                try:
                    text = (await client.get(f"http://{address}/metrics")).text
                except httpx.HTTPError:
                    cluster.errors["/metrics did not answer"] += 1
                    continue
                for name, label, value in OVERLOAD.findall(text):
                    if name == "pressure_ratio":
                        if label == "loop_delay" and float(value) > cluster.pressures.get(label, 0.0):
                            cluster.starved_s = waited_s - waited_before_s
                        cluster.pressures[label] = max(cluster.pressures.get(label, 0.0), float(value))
                    else:
                        actions[f"{label} {name.removeprefix('action')}"] += round(float(value))
            cluster.actions = {
                name: max(actions.get(name, 0), cluster.actions.get(name, 0)) for name in actions | cluster.actions
            }
            await asyncio.sleep(LOOK_S)


def memory(cluster: Cluster) -> dict[str, float]:
    """Resident megabytes by kind of process; several of a kind are added up."""
    found: dict[str, float] = defaultdict(float)
    root = psutil.Process(cluster.process.pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            found[kind_of(process, root.pid)] += process.memory_info().rss / MB
        except psutil.Error:
            continue  # it has just ended
    return dict(found)


async def measure(clusters: list[Cluster], options: argparse.Namespace) -> list[dict[str, Any]]:
    began_s = time.monotonic()
    until_s = began_s + 60 * options.minutes
    rows: list[dict[str, Any]] = []
    tasks = [
        asyncio.create_task(one_client(cluster, number, options.pause_s, until_s))
        for cluster in clusters
        for number in range(options.clients)
    ]
    tasks += [asyncio.create_task(watch_overload(cluster, until_s)) for cluster in clusters]
    while time.monotonic() < until_s:
        rows.append({"minute": (time.monotonic() - began_s) / 60, "load": os.getloadavg()[0]})
        for cluster in clusters:
            rows[-1][cluster.name] = {"MB": memory(cluster), "counts": dict(cluster.counts)}
            print(line(rows[-1], cluster), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows))
        await asyncio.sleep(min(options.report_every_s, max(0.0, until_s - time.monotonic())))
    await asyncio.gather(*tasks)
    return rows


def line(row: dict[str, Any], cluster: Cluster) -> str:
    found = row[cluster.name]
    parts = " ".join(f"{kind} {mb:.0f}" for kind, mb in sorted(found["MB"].items(), key=lambda one: -one[1])[:6])
    return f"{row['minute']:6.1f} min, load {row['load']:4.1f}, {cluster.name}: {parts} MB; {found['counts']}"


def growth(rows: list[dict[str, Any]], name: str) -> dict[str, tuple[float, float]]:
    """By kind of process: megabytes gained in the first and in the second half of the time."""
    start, middle, end = (rows[at][name]["MB"] for at in (0, len(rows) // 2, -1))
    return {
        kind: (middle[kind] - start[kind], end[kind] - middle[kind]) for kind in end if kind in start and kind in middle
    }


def plot(rows: list[dict[str, Any]], clusters: list[Cluster], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(clusters), figsize=(6 * len(clusters), 4), sharey=True, squeeze=False)
    for cluster, axis in zip(clusters, axes[0], strict=True):
        for kind in rows[-1][cluster.name]["MB"]:
            axis.plot([row["minute"] for row in rows], [row[cluster.name]["MB"].get(kind) for row in rows], label=kind)
        axis.set(title=cluster.name, xlabel="minutes", ylabel="resident memory, MB")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clusters", type=int, default=2)
    parser.add_argument("--default-kv-clusters", type=int, default=1, help="of these, with the default KV cache")
    parser.add_argument("--clients", type=int, default=3, help="of each cluster")
    parser.add_argument("--pause-s", type=float, default=0.3, help="of a client between two requests, on average")
    parser.add_argument("--kv-cache-memory", default="64MiB", help="of the other clusters")
    parser.add_argument("--report-every-s", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        clusters = []
        for number in range(options.clusters):
            is_default = number < options.default_kv_clusters
            name = f"{'default KV cache' if is_default else 'KV cache taken at start'} {number}"
            flags = [] if is_default else ["--kv-cache-memory", options.kv_cache_memory]
            clusters.append(stack.enter_context(started(name, flags)))
        rows = asyncio.run(measure(clusters, options))
    for cluster in clusters:
        print(f"{cluster.name}: {dict(cluster.counts)}")
        for error, count in sorted(cluster.errors.items(), key=lambda one: -one[1])[:10]:
            print(f"  {count} x {error}")
        print("  highest pressures: " + ", ".join(f"{name} {at:.1%}" for name, at in sorted(cluster.pressures.items())))
        print(f"  routers waited for a core at the highest loop delay: {cluster.starved_s:.1f} s of about {LOOK_S:g} s")
        done = {name: count for name, count in cluster.actions.items() if count}
        print(f"  overload actions: {done or 'none'}")
        for kind, (first, second) in growth(rows, cluster.name).items():
            print(f"  {kind}: {first:+.0f} MB in the first half, {second:+.0f} MB in the second")
    if options.plot:
        plot(rows, clusters, options.plot)


if __name__ == "__main__":
    main()

"""Benchmark of an idle cluster: the CPU that its processes take while nobody asks for anything, beside what Ray takes.

    python -m benchmarks.idle_cluster [--seconds 60] [--replicas 1] [--tensor-parallel-size 1] [--json FILE]

Two clusters run for so long, one after the other: ours on the bundled model, and an application of Serve with as many
deployments, replicas and actors that do nothing, with Serve's own settings. What Ray takes by itself is the second;
ours is beyond that. CPU is what the kernel has counted for each process, wake-ups are voluntary changes of context.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve.local import num_cpus_of_our_own, ray_connection
from holdfast.cluster.serve.serving import serving

SETTLE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Use:
    """Since the start of a process."""

    cpu_s: float
    wakeups: dict[str, int]
    """Of its threads, by their names."""


def uses() -> dict[tuple[str, int], Use]:
    """Of this process and all below it, by what they are."""
    me = psutil.Process()
    found: dict[tuple[str, int], Use] = {}
    for process in [me, *me.children(recursive=True)]:
        try:
            times, tasks = process.cpu_times(), Path(f"/proc/{process.pid}/task")
            found[kind_of(process, me.pid), process.pid] = Use(times.user + times.system, wakeups(tasks))
        except (psutil.Error, OSError):
            continue  # it has just ended
    return found


def wakeups(tasks: Path) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for task in tasks.iterdir():
        line = next(line for line in (task / "status").read_text().splitlines() if line.startswith("voluntary"))
        counts[(task / "comm").read_text().strip()] += int(line.split()[1])
    return dict(counts)


def kind_of(process: psutil.Process, own_pid: int) -> str:
    words = process.cmdline() or [process.name()]
    if process.pid == own_pid:
        return "this process"
    if any("hang_supervisor" in word for word in words):
        return "hang supervisor"
    if words[0].startswith("ray::"):
        return words[0].removeprefix("ray::").removeprefix("ServeReplica:holdfast:").split(".")[0]
    return next((Path(word).name for word in words if word.endswith((".py", "raylet", "gcs_server"))), process.name())


@contextmanager
def empty_cluster(config: HoldfastConfig) -> Iterator[None]:
    """Serve with as many processes, which do nothing."""
    import ray
    from ray import serve

    class Empty:
        pass

    class RankActor:
        def ready(self) -> None:
            pass

    with ray_connection(config.cluster, num_cpus_of_our_own(config)):
        serve.start(proxy_location="Disabled")
        quiet: dict[str, Any] = {"log_level": "WARNING", "enable_access_log": False}
        numbers = {"Directory": 1, "Replica": config.cluster.replicas, "Router": config.cluster.routers}
        for name, count in numbers.items():
            options: dict[str, Any] = {"num_cpus": 0}
            deployment = serve.deployment(
                Empty, name=name, num_replicas=count, ray_actor_options=options, logging_config=quiet
            )
            serve.run(deployment.bind(), name=f"holdfast-{name}", route_prefix=None)
        others = config.cluster.replicas * (config.parallel.tensor_parallel_size - 1)
        rank_actor: Any = ray.remote(num_cpus=0)(RankActor)
        actors = [rank_actor.remote() for _ in range(others)]
        ray.get([actor.ready.remote() for actor in actors])
        yield


def measure(seconds: float) -> dict[str, dict[str, Any]]:
    """By what a process is: how many, per cent of a core, and wake-ups a second by thread."""
    time.sleep(SETTLE_S)
    before, began = uses(), time.monotonic()
    time.sleep(seconds)
    after, passed = uses(), time.monotonic() - began
    found: dict[str, dict[str, Any]] = {}
    for key in before.keys() & after.keys():
        row = found.setdefault(key[0], {"processes": 0, "percent": 0.0, "wakeups": Counter()})
        row["processes"] += 1
        row["percent"] += 100 * (after[key].cpu_s - before[key].cpu_s) / passed
        for thread, count in after[key].wakeups.items():
            row["wakeups"][thread] += (count - before[key].wakeups.get(thread, 0)) / passed
    return found


def show(ours: dict[str, dict[str, Any]], empty: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table("process", "number", "% of a core", "empty application", "wake-ups a second, by thread")
    for kind in sorted(ours.keys() | empty.keys(), key=lambda kind: -ours.get(kind, {}).get("percent", 0.0)):
        row, other = ours.get(kind), empty.get(kind)
        threads = row["wakeups"].most_common(5) if row else []
        table.add_row(
            kind,
            str(row["processes"]) if row else "",
            f"{row['percent']:.2f}" if row else "",
            f"{other['percent']:.2f}" if other else "",
            ", ".join(f"{name} {count:.1f}" for name, count in threads if count >= 0.5),
        )
    console.print(table)
    both = [sum(row["percent"] for row in rows.values()) for rows in (ours, empty)]
    console.print(f"all: {both[0]:.2f} % of a core, empty {both[1]:.2f}, beyond Ray {both[0] - both[1]:.2f}")
    console.print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = HoldfastConfig.model_validate(
        {
            "cluster": {"replicas": options.replicas, "port": 0, "http_port": 0},
            "parallel": {"tensor_parallel_size": options.tensor_parallel_size},
        }
    )
    with serving(config, lambda *_: None):
        ours = measure(options.seconds)
    with empty_cluster(config):
        empty = measure(options.seconds)
    show(ours, empty, Console(width=160))
    if options.json:
        options.json.write_text(json.dumps({"ours": ours, "empty": empty}, indent=1))


if __name__ == "__main__":
    main()

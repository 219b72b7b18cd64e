"""Benchmark of a replica's start: SIGKILL of one of two replicas, until its successor serves, split by phase.

    python -m benchmarks.replica_start [--model demo] [--rounds 3] [--json FILE]

One cluster of our own, two replicas, one router. A round kills one replica's process and follows the directory: when
the successor's process shows itself, and each phase that it tells. Printed: seconds from the kill, of every round.
`noticed` is the loss as the router has it, over its link; `linked` is when the router has the successor's link.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.serve import models
from holdfast.cluster.serve.app import HEALTH_CHECK_PERIOD_S
from holdfast.cluster.serve.directory import Role, Snapshot
from holdfast.cluster.serve.serving import serving
from holdfast.worker.config import ModelConfig

TIMEOUT_S: Final = 120.0

Times = dict[str, float]
"""Seconds from the kill by what happened then."""


def replica_processes() -> list[psutil.Process]:
    """By their titles, which end with the method that Serve has called, as long as it runs."""
    return [one for one in psutil.Process().children(recursive=True) if any(map(is_replica, title(one)))]


def is_replica(word: str) -> bool:
    return word.startswith("ray::ServeReplica") and ":Replica" in word


def title(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def follow(directory: Any, killed_at: float, known: set[str], num_replicas: int) -> Times:
    """Watches the directory until the successor is linked."""
    times: Times = {}
    version = 0
    while "linked" not in times:
        if time.monotonic() - killed_at > TIMEOUT_S:
            raise SystemExit(f"no successor within {TIMEOUT_S:g} s: {times}")
        snapshot: Snapshot = directory.watch.remote(version).result(timeout_s=TIMEOUT_S)
        version, now = snapshot.version, time.monotonic() - killed_at
        linked = min((number for one in snapshot.serving(Role.ROUTER) for _, number in one.linked), default=0)
        if linked < num_replicas:
            times.setdefault("noticed", now)
        elif "serving" in times:
            times["linked"] = now
        for member in snapshot.members:
            if member.role is Role.REPLICA and member.member_id not in known:
                times.setdefault(member.phase, now)
    return times


def until_serve_knows(config: HoldfastConfig) -> None:
    """Serve sees a replica that it still takes to be starting sooner than one that runs."""
    from ray import serve

    name = models.application_name(config.cluster.namespace, config.model.name)
    while serve.status().applications[name].status != "RUNNING":
        time.sleep(0.1)
    time.sleep(2 * HEALTH_CHECK_PERIOD_S)


def rounds(model: str, num_rounds: int) -> list[Times]:
    config = HoldfastConfig(
        model=ModelConfig(model=model), cluster=ClusterConfig(replicas=2, routers=1, port=0, http_port=None)
    )
    found = []
    with serving(config, lambda phase, done, total: None):
        directory = models.directory_of(config.cluster.namespace)
        for _ in range(num_rounds):
            until_serve_knows(config)
            time.sleep(random.uniform(0.0, HEALTH_CHECK_PERIOD_S))  # at any moment between two of Serve's checks
            snapshot: Snapshot = directory.watch.remote(0).result(timeout_s=TIMEOUT_S)
            known = {member.member_id for member in snapshot.members}
            killed_at = time.monotonic()
            replica_processes()[0].kill()
            found.append(follow(directory, killed_at, known, 2))
            print(json.dumps({name: round(value, 2) for name, value in found[-1].items()}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where all rounds are written to")
    options = parser.parse_args()
    found = rounds(options.model, options.rounds)
    table = Table("s from the kill", *(f"round {number}" for number, _ in enumerate(found, 1)))
    for phase in dict.fromkeys(name for times in found for name in times):
        table.add_row(phase, *(f"{times[phase]:.2f}" if phase in times else "" for times in found))
    Console().print(table)
    if options.json:
        machine: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()}
        options.json.write_text(json.dumps({"machine": machine, "rounds": found}, indent=1))


if __name__ == "__main__":
    main()

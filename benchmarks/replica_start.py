"""Benchmark of a replica's start: SIGKILL of one of two replicas, until its successor serves, split by phase.

    python -m benchmarks.replica_start [--model demo] [--tp 1] [--rounds 3] [--scale-up] [--json FILE]

One cluster of our own, two replicas, one router. A round kills one replica's process, or with `--scale-up` asks for a
second replica where there is one, and follows the directory: when the new process shows itself, and each phase that it
tells. Printed: seconds from that moment, of every round. `noticed` is the loss as the router has it, over its link;
`processes` is when the last process of the new replica began; `linked` is when the router has the new replica's link.
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
from holdfast.worker.config import ModelConfig, ParallelConfig

TIMEOUT_S: Final = 120.0

Times = dict[str, float]
"""Seconds from the beginning of a round by what happened then."""


def replica_processes() -> list[psutil.Process]:
    """Leaders, by their titles, which end with the method that Serve has called, as long as it runs."""
    return [one for one in psutil.Process().children(recursive=True) if any(map(is_leader, title(one)))]


def rank_processes() -> list[psutil.Process]:
    """Leaders and the other ranks."""
    below = psutil.Process().children(recursive=True)
    return [one for one in below if any(is_leader(word) or "RankActor" in word for word in title(one))]


def is_leader(word: str) -> bool:
    return word.startswith("ray::ServeReplica") and ":Replica" in word


def title(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def started_since_boot(process: psutil.Process) -> float:
    """In seconds. What psutil says counts from a boot time in whole seconds."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def follow(directory: Any, began_at: float, known: set[str], num_replicas: int) -> Times:
    """Watches the directory until the new replica is linked."""
    times: Times = {}
    version = 0
    while "linked" not in times:
        if time.monotonic() - began_at > TIMEOUT_S:
            raise SystemExit(f"no new replica within {TIMEOUT_S:g} s: {times}")
        snapshot: Snapshot = directory.watch.remote(version).result(timeout_s=TIMEOUT_S)
        version, now = snapshot.version, time.monotonic() - began_at
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


def rounds(model: str, ranks: int, num_rounds: int, *, is_scale_up: bool) -> list[Times]:
    config = HoldfastConfig(
        model=ModelConfig(model=model),
        parallel=ParallelConfig(tensor_parallel_size=ranks),
        cluster=ClusterConfig(replicas=2, routers=1, port=0, http_port=None),
    )
    application = models.application_name(config.cluster.namespace, config.model.name)
    found = []
    with serving(config, lambda phase, done, total: None):
        directory = models.directory_of(config.cluster.namespace)
        for _ in range(num_rounds):
            if is_scale_up:
                models.scale(application, 1)
                until_there_is_one(directory)
            until_serve_knows(config)
            time.sleep(random.uniform(0.0, HEALTH_CHECK_PERIOD_S))  # at any moment between two of Serve's checks
            snapshot: Snapshot = directory.watch.remote(0).result(timeout_s=TIMEOUT_S)
            known = {member.member_id for member in snapshot.members}
            before = {one.pid for one in rank_processes()}
            began_at, began_since_boot = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
            if is_scale_up:
                models.scale(application, 2)
            else:
                replica_processes()[0].kill()
            times = follow(directory, began_at, known, 2)
            starts = [started_since_boot(one) - began_since_boot for one in rank_processes() if one.pid not in before]
            found.append(dict(sorted((times | {"processes": max(starts)}).items(), key=lambda item: item[1])))
            print(json.dumps({name: round(value, 2) for name, value in found[-1].items()}), flush=True)
    return found


def until_there_is_one(directory: Any) -> None:
    version = 0
    while True:
        snapshot: Snapshot = directory.watch.remote(version).result(timeout_s=TIMEOUT_S)
        version = snapshot.version
        if sum(member.role is Role.REPLICA for member in snapshot.members) == 1:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tp", type=int, default=1, help="ranks of each replica")
    parser.add_argument("--scale-up", action="store_true", help="a second replica is asked for; none is killed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where all rounds are written to")
    options = parser.parse_args()
    found = rounds(options.model, options.tp, options.rounds, is_scale_up=options.scale_up)
    table = Table("s from the beginning", *(f"round {number}" for number, _ in enumerate(found, 1)))
    for phase in dict.fromkeys(name for times in found for name in times):
        table.add_row(phase, *(f"{times[phase]:.2f}" if phase in times else "" for times in found))
    Console().print(table)
    if options.json:
        machine: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()}
        options.json.write_text(json.dumps({"machine": machine, "rounds": found}, indent=1))


if __name__ == "__main__":
    main()

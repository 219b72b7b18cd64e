"""Benchmark of tensor parallelism on one host: steps of two ranks with one thread each, beside one rank's, in one run.

    python -m benchmarks.tensor_parallel [MODEL] [--rounds 30] [--on-one-core] [--idle-s 5] [--json FILE]

Rank 0 has both programs, and takes some steps of each by turns; for those of two ranks it sends an order first, as a
replica does. `one rank, two threads` is what a replica of one rank makes of the same cores. Then nobody takes a step
for a while: the threads of both processes should sleep. `--on-one-core`: both ranks share a core, which no way of
waiting makes faster than one rank; what it costs beyond that is what they take from each other.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decoder_steps import KINDS, Kind, Timed, make_batch
from benchmarks.free_port import pick_port
from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.worker.config import CacheConfig, ModelConfig, ParallelConfig, WorkerConfig
from holdfast.worker.executors.rendezvous import Rendezvous
from holdfast.worker.executors.tensor_parallel import DistributedGroup, SingleRank, TensorParallelGroup
from holdfast.worker.models.loading import LoadedModel, load_model

END: Final = len(KINDS)
PAUSE: Final = END + 1
IN_A_ROW: Final = 8
"""Steps of one program follow each other, as those of a decode do: ranks are awake when the next one comes."""


def load(model: str, group: TensorParallelGroup) -> LoadedModel:
    config = WorkerConfig(
        model=ModelConfig.model_validate({"model": model, "executor": "native", "dtype": "bfloat16"}),
        parallel=ParallelConfig(tensor_parallel_size=group.size),
        cache=CacheConfig(kv_cache_memory=1 << 30),
    )
    return load_model(located(config), group, torch.device("cpu"), lambda phase, done, total: None)


def stay_on_one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def thread_seconds() -> dict[str, float]:
    """CPU time of each thread of this process, by its name and number."""
    seconds: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        seconds[f"{name} {task.name}"] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def busy_threads(idle_s: float) -> dict[str, float]:
    """What each thread took of a core while nothing was asked; only those above a thousandth."""
    before = thread_seconds()
    time.sleep(idle_s)
    shares = {name: (now - before.get(name, 0.0)) / idle_s for name, now in thread_seconds().items()}
    return {name: share for name, share in shares.items() if share > 0.001}


def follow(
    model: str, rendezvous: Rendezvous, on_one_core: bool, idle_s: float, results: "multiprocessing.Queue[object]"
) -> None:
    """The life of rank 1: runs what rank 0 orders."""
    torch.set_num_threads(1)
    if on_one_core:
        stay_on_one_core()
    group = DistributedGroup(1, 2, rendezvous)
    loaded = load(model, group)
    while (order := int(group.broadcast(None)[0])) != END:
        if order == PAUSE:
            results.put(busy_threads(idle_s))
        else:
            loaded.backend.run(make_batch(KINDS[order], loaded.info.block_size), with_logits=False)
    loaded.backend.close()
    group.close()


class Leader:
    """Rank 0, with programs of its own beside the one that it shares."""

    def __init__(self, model: str, group: DistributedGroup) -> None:
        self._group = group
        torch.set_num_threads(1)
        alone = Timed("one rank", load(model, SingleRank()))
        self._shared = Timed("two ranks", load(model, group))
        torch.set_num_threads(2)
        threaded = Timed("one rank, two threads", load(model, SingleRank()))
        torch.set_num_threads(1)
        self.programs = [alone, self._shared, threaded]
        self.cpu: dict[tuple[str, str], list[float]] = {}
        """Seconds of this process, by program and kind of step."""

    def order(self, number: int) -> None:
        self._group.broadcast(np.array([number]))

    def step(self, program: Timed, number: int) -> None:
        kind: Kind = KINDS[number]
        cpu = time.process_time()
        if program is self._shared:
            batch = make_batch(kind, program.loaded.info.block_size)
            started = time.perf_counter()
            self.order(number)
            program.loaded.backend.run(batch, with_logits=False)
            program.seconds.setdefault(kind.name, []).append(time.perf_counter() - started)
        else:
            program.step(kind)
        self.cpu.setdefault((program.name, kind.name), []).append(time.process_time() - cpu)


def show(leader: Leader, console: Console) -> None:
    table = Table("step", "program", "median ms", "p10 ms", "to one rank", "CPU of rank 0")
    for kind in KINDS:
        alone = statistics.median(leader.programs[0].seconds[kind.name])
        for one in leader.programs:
            seconds, cpu = sorted(one.seconds[kind.name]), leader.cpu[one.name, kind.name]
            median = statistics.median(seconds)
            times = [f"{value * 1e3:.2f}" for value in (median, seconds[len(seconds) // 10])]
            table.add_row(kind.name, one.name, *times, f"{median / alone:.2f}", f"{statistics.median(cpu) * 1e3:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--on-one-core", action="store_true")
    parser.add_argument("--idle-s", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    rendezvous = Rendezvous.at("127.0.0.1", pick_port())
    arguments = (options.model, rendezvous, options.on_one_core, options.idle_s, results)
    follower = context.Process(target=follow, args=arguments, daemon=True)
    follower.start()
    if options.on_one_core:
        stay_on_one_core()
    group = DistributedGroup(0, 2, rendezvous)
    leader = Leader(options.model, group)
    for _ in range(options.rounds):
        for number in range(len(KINDS)):
            for program in leader.programs:
                for _ in range(IN_A_ROW):
                    leader.step(program, number)
    leader.order(PAUSE)
    busy = {"rank 0": busy_threads(options.idle_s), "rank 1": results.get()}
    leader.order(END)
    follower.join()
    console = Console()
    show(leader, console)
    console.print(f"threads that took more than 0.1 % of a core in {options.idle_s:.0f} s without steps: {busy}")
    console.print(f"{options.model}, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps({one.name: one.seconds for one in leader.programs}, indent=1))


if __name__ == "__main__":
    main()

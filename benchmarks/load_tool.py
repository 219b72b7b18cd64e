"""What `holdfast bench` itself costs: CPU per piece of output and per request, on servers that send prepared bytes.

    python -m benchmarks.load_tool [--streams 64] [--steps-per-s 25] [--tokens 64] [--requests 512] [--json FILE]

The servers send each stream a piece a step, so the true time per output token is known: what the tool reads above it,
and how late it sends, is its own doing and the machine's.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.router_parts.part import Part
from holdfast.cluster.bench.driver import Driver, LoadLimits
from holdfast.cluster.bench.report import Load
from holdfast.cluster.bench.runs import Target
from holdfast.cluster.bench.summary import summary
from holdfast.cluster.bench.workload import Calibration, Lengths, PromptTexts, Workload

Figures = dict[str, float]


async def measured(target: Target, options: argparse.Namespace) -> Figures:
    """The tool's own CPU and readings. A prepared answer over gRPC has no usage: its end counts as cut off."""
    sender, _ = await target.sender("demo", {})
    work = Workload(prompt_tokens=Lengths("fixed", 128), output_tokens=Lengths("fixed", options.tokens))
    driver = Driver(sender, PromptTexts(0, Calibration()), LoadLimits(concurrency=options.streams))
    before_s, began_s = time.process_time(), time.perf_counter()
    await driver.run(islice(work.sessions(), options.requests))
    cpu_s, wall_s = time.process_time() - before_s, time.perf_counter() - began_s
    await sender.close()
    for record in driver.records:
        record.error, record.num_output_tokens = None, len(record.piece_s)
    run = summary(Load(kind="closed", concurrency=options.streams), driver.records, None)
    assert run.tpot_s is not None
    num_pieces = sum(len(record.piece_s) for record in driver.records)
    return {
        "pieces/s": num_pieces / wall_s,
        "us per piece": 1e6 * cpu_s / num_pieces,
        "us per request": 1e6 * cpu_s / len(driver.records),
        "share of a core": cpu_s / wall_s,
        "TPOT p50 to the truth": run.tpot_s.p50 * options.steps_per_s,
        "TPOT p99 to the truth": run.tpot_s.p99 * options.steps_per_s,
    }


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def awaited() -> Any:
        return await work()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(awaited())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps-per-s", type=float, default=25)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pace = str(options.steps_per_s)
    found: dict[str, Figures] = {}
    with Part("bare_http", pace) as http, Part("bare_server", pace, str(options.tokens)) as grpc:
        targets = {
            "HTTP, chat": Target.parsed(f"http://{http.address}", "chat"),
            "gRPC": Target.parsed(grpc.address, "holdfast"),
        }
        for name, target in targets.items():
            found[name] = run(partial(measured, target, options))
    table = Table("protocol", *next(iter(found.values())))
    for name, figures in found.items():
        table.add_row(name, *(f"{value:.3g}" for value in figures.values()))
    Console(width=130).print(table)
    Console(width=130).print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

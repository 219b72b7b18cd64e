"""A model served, beside `LLM.generate`: both rates in one run, and which process takes how much of the cores.

    python -m benchmarks.served MODEL [--streams 1 32] [--tokens 128] [--rounds 4] [--json FILE]

The same requests go to `LLM.generate` and, over gRPC, from a client through a router to a replica, by turns. All of
these processes share the cores: what the client and the router take, the replica cannot have. No Ray is started; tokens
pass through none. What may not live here: the processes (`router_parts/`).
"""

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.router_parts.part import Part

Figures = defaultdict[str, list[float]]
"""Tokens a second, or microseconds of CPU per token, one for each round."""


def offline(part: Part, streams: int, tokens: int, figures: Figures) -> None:
    before = part.cpu_s()
    done = part.order("generate", streams=streams, tokens=tokens)
    figures["LLM.generate: tokens/s"].append(done["tokens"] / done["seconds"])
    figures["LLM.generate: us per token"].append(1e6 * (part.cpu_s() - before) / done["tokens"])


def served(parts: dict[str, Part], streams: int, tokens: int, figures: Figures) -> None:
    before = {name: part.cpu_s() for name, part in parts.items()}
    counted, began_s = parts["client"].order("count")["tokens"], time.monotonic()
    parts["client"].order("begin", streams=streams, tokens=tokens, repeats=1)
    num_tokens = parts["client"].order("finish")["tokens"] - counted
    figures["served: tokens/s"].append(num_tokens / (time.monotonic() - began_s))
    for name, part in parts.items():
        figures[f"{name}: us per token"].append(1e6 * (part.cpu_s() - before[name]) / num_tokens)


def measure(model: Path, streams: list[int], tokens: int, rounds: int) -> dict[int, Figures]:
    figures = {number: Figures(list) for number in streams}
    with ExitStack() as stack:
        alone = stack.enter_context(Part("offline", str(model)))
        replica = stack.enter_context(Part("model_replica", str(model)))
        router = stack.enter_context(Part("served_router", replica.address, "--model", str(model)))
        client = stack.enter_context(Part("clients", "our-async", router.address))
        parts = {"replica": replica, "router": router, "client": client}
        offline(alone, max(streams), 8, Figures(list))  # what is made once is made
        served(parts, max(streams), 8, Figures(list))
        for _ in range(rounds):
            for number in streams:
                offline(alone, number, tokens, figures[number])
                served(parts, number, tokens, figures[number])
    return figures


def show(figures: dict[int, Figures], console: Console) -> None:
    names = ["LLM.generate", "replica", "router", "client"]
    table = Table("streams", "LLM.generate, tokens/s", "served", "of it", *(f"{name}, us per token" for name in names))
    for number, found in figures.items():
        both = list(zip(found["served: tokens/s"], found["LLM.generate: tokens/s"], strict=True))
        rates = [statistics.median(found[f"{name}: tokens/s"]) for name in ("LLM.generate", "served")]
        share = statistics.median(mine / alone for mine, alone in both)
        cpu = [f"{statistics.median(found[f'{name}: us per token']):.0f}" for name in names]
        table.add_row(str(number), *(f"{rate:.0f}" for rate in rates), f"{share:.2f}", *cpu)
    console.print(table)
    console.print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder: `benchmarks/peers/models.py` makes some")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = measure(options.model.resolve(), options.streams, options.tokens, options.rounds)
    show(figures, Console(width=130))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

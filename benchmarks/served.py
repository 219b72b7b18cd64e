"""A model served, beside `LLM.generate`: both rates in one run, and which process takes how much of the cores.

    python -m benchmarks.served MODEL [--streams 1 32] [--tokens 128] [--rounds 4] [--apart] [--json FILE]

The same requests go to `LLM.generate` and, over gRPC and over HTTP, from a client through a router to a replica, by
turns. All of these processes share the cores: what the client and the router take, the replica cannot have. The client
of gRPC is `AsyncClient`; that of HTTP reads a socket, and counts tokens by the usage. No Ray is started; tokens pass
through none. With `--apart` engines have the first half of the cores, and routers and clients the other: what is lost
then is what serving costs where there are cores enough.
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


def served(api: str, parts: dict[str, Part], streams: int, tokens: int, figures: Figures) -> None:
    before = {name: part.cpu_s() for name, part in parts.items()}
    counted, began_s = parts["client"].order("count")["tokens"], time.monotonic()
    parts["client"].order("begin", streams=streams, tokens=tokens, repeats=1)
    num_tokens = parts["client"].order("finish")["tokens"] - counted
    figures[f"{api}: tokens/s"].append(num_tokens / (time.monotonic() - began_s))
    for name, part in parts.items():
        figures[f"{api} {name}: us per token"].append(1e6 * (part.cpu_s() - before[name]) / num_tokens)


def measure(model: Path, streams: list[int], tokens: int, rounds: int, apart: bool = False) -> dict[int, Figures]:
    figures = {number: Figures(list) for number in streams}
    cores = sorted(os.sched_getaffinity(0))
    engines, others = (cores[: len(cores) // 2], cores[len(cores) // 2 :]) if apart else (cores, cores)
    with ExitStack() as stack:

        def started(module: str, *arguments: str) -> Part:
            own = engines if module in ("offline", "model_replica") else others
            return stack.enter_context(Part(module, *arguments, cores=own))

        alone, replica = started("offline", str(model)), started("model_replica", str(model))
        routers = {
            "gRPC": started("served_router", replica.address, "--model", str(model)),
            "HTTP": started("served_router", replica.address, "--model", str(model), "--http"),
        }
        clients = {
            "gRPC": started("clients", "our-async", routers["gRPC"].address),
            "HTTP": started("http_clients", routers["HTTP"].address, "--completions"),
        }
        apis = {name: {"replica": replica, "router": routers[name], "client": clients[name]} for name in routers}
        offline(alone, max(streams), 8, Figures(list))  # what is made once is made
        for name, parts in apis.items():
            served(name, parts, max(streams), 8, Figures(list))
        for index in range(rounds):
            for number in streams:
                offline(alone, number, tokens, figures[number])
                for name in sorted(apis, reverse=bool(index % 2)):  # neither is always first
                    served(name, apis[name], number, tokens, figures[number])
    return figures


def show(figures: dict[int, Figures], console: Console) -> None:
    names = ("replica", "router", "client")
    table = Table("streams", "", "tokens/s", "of LLM.generate", "of gRPC", *(f"{name}, us per token" for name in names))
    for number, found in figures.items():
        alone = found["LLM.generate: tokens/s"]
        cpu = statistics.median(found["LLM.generate: us per token"])
        table.add_row(str(number), "LLM.generate", f"{statistics.median(alone):.0f}", "", "", f"{cpu:.0f}", "", "")
        for api in ("gRPC", "HTTP"):
            rates = found[f"{api}: tokens/s"]
            shares = (_ratio(rates, alone), _ratio(rates, found["gRPC: tokens/s"]))
            spent = [f"{statistics.median(found[f'{api} {name}: us per token']):.0f}" for name in names]
            table.add_row(str(number), api, f"{statistics.median(rates):.0f}", *shares, *spent)
    console.print(table)
    console.print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


def _ratio(rates: list[float], others: list[float]) -> str:
    """Round by round: the median, and the least and the most."""
    every = [rate / other for rate, other in zip(rates, others, strict=True)]
    return f"{statistics.median(every):.2f} [{min(every):.2f}..{max(every):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder: `benchmarks/peers/models.py` makes some")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--apart", action="store_true", help="engines on cores of their own")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = measure(options.model.resolve(), options.streams, options.tokens, options.rounds, options.apart)
    show(figures, Console(width=130))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

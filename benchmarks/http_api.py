"""CPU of a router's HTTP API per streamed token, beside a bare application on its server that sends prepared bytes.

    python -m benchmarks.http_api [--streams 64] [--steps-per-s 25] [--seconds 1.5] [--rounds 8] [--json FILE]

No model: a replica that only counts gives each stream a token a step, over the real link, so the router's figure has
the link, the text and the JSON in it. Clients count events, so a router that falls behind and sends several tokens in
one event looks dearer than it is.
"""

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.router import Figures, Load, Measured, Pair, ratio, streamed
from benchmarks.router_parts.part import Part


def pairs(load: Load, parts: ExitStack) -> list[Pair]:
    """Starts all processes."""

    def started(module: str, *arguments: str) -> Part:
        return parts.enter_context(Part(module, *arguments))

    pace = str(load.steps_per_s)
    bare = started("bare_http", pace)
    router = started("served_router", started("replica", pace).address, "--http")
    bare_client, client = started("http_clients", bare.address), started("http_clients", router.address)
    return [
        Pair(client=bare_client, measured=(Measured(name="bare Starlette on uvicorn", part=bare),)),
        Pair(client=client, measured=(Measured(name="router", part=router, beside="bare Starlette on uvicorn"),)),
    ]


def measure(load: Load, rounds: int) -> tuple[list[Pair], Figures]:
    figures = Figures(list)
    with ExitStack() as parts:
        every = pairs(load, parts)
        for number in range(rounds + 1):
            for pair in every:
                for name, figure in streamed(pair, load):
                    if number:  # the first round makes what is made once
                        figures[name].append(figure)
    return every, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps-per-s", type=float, default=25)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each pair in each round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    every, figures = measure(Load(arguments.streams, arguments.steps_per_s, arguments.seconds), arguments.rounds)
    table = Table("process", "us per token", "to bare")
    for one in (one for pair in every for one in pair.measured):
        table.add_row(
            one.name,
            f"{statistics.median(figures[f'{one.name}: us per token']):.1f}",
            ratio(figures, one, "us per token"),
        )
    Console(width=100).print(table, f"{time.monotonic() - began:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

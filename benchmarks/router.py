"""CPU of router, link and clients per request and per streamed token, beside grpc.aio that sends prepared bytes.

    python -m benchmarks.router [--streams 32] [--steps-per-s 50] [--seconds 1.5] [--rounds 8] [--json FILE]

No model: a replica that only counts gives each stream a token a step, over the real link. Every process is measured by
itself, by the kernel's clock of its CPU time. Pairs of a server and a client alternate in rounds, so that all of them
see the same company on the machine; the table has medians, and ratios to the bare one of the same round.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.router_parts.codec_times import codec_times
from benchmarks.router_parts.part import Part

SETTLE_S = 0.5
"""Between the beginning of all streams, and what is measured of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One process of a pair: what it is called in the table, and what it is compared with."""

    name: str
    part: Part
    beside: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A client that reads from a server, and the processes to measure meanwhile."""

    client: Part
    measured: tuple[Measured, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """What clients ask for."""

    streams: int
    steps_per_s: float
    seconds: float

    @property
    def tokens(self) -> int:
        """Of one stream: more than are streamed while it is measured."""
        return round((self.seconds + 2 * SETTLE_S) * self.steps_per_s)


Figures = defaultdict[str, list[float]]
"""Microseconds, or messages, by what was measured; one for each round."""


def pairs(load: Load, parts: ExitStack) -> list[Pair]:
    """Starts all processes."""

    def started(module: str, *arguments: str) -> Part:
        return parts.enter_context(Part(module, *arguments))

    pace = str(load.steps_per_s)
    bare = started("bare_server", pace, str(load.tokens))
    replica = started("replica", pace)
    router = started("served_router", replica.address)
    bare_async, bare_blocking = (started("clients", kind, bare.address) for kind in ("bare-async", "bare-blocking"))
    of_router = started("clients", "our-async", router.address)
    our_async, our_blocking = (started("clients", kind, bare.address) for kind in ("our-async", "our-blocking"))
    bare_client, bare_blocking_client = "bare grpc.aio client", "bare blocking grpc client"
    return [
        Pair(
            client=bare_async,
            measured=(
                Measured(name="bare grpc.aio server", part=bare),
                Measured(name=bare_client, part=bare_async),
            ),
        ),
        Pair(
            client=of_router,
            measured=(
                Measured(name="router", part=router, beside="bare grpc.aio server"),
                Measured(name="replica without a model", part=replica),
                Measured(name="AsyncClient of the router", part=of_router, beside=bare_client),
            ),
        ),
        Pair(client=our_async, measured=(Measured(name="AsyncClient", part=our_async, beside=bare_client),)),
        Pair(client=bare_blocking, measured=(Measured(name=bare_blocking_client, part=bare_blocking),)),
        Pair(client=our_blocking, measured=(Measured(name="Client", part=our_blocking, beside=bare_blocking_client),)),
    ]


def streamed(pair: Pair, load: Load) -> Iterator[tuple[str, float]]:
    """CPU per token in the middle of as many streams."""
    pair.client.order("begin", streams=load.streams, tokens=load.tokens, repeats=1)
    time.sleep(SETTLE_S)
    before, counts = {one.name: one.part.cpu_s() for one in pair.measured}, pair.client.order("count")
    time.sleep(load.seconds)
    after, counted = {one.name: one.part.cpu_s() for one in pair.measured}, pair.client.order("count")
    pair.client.order("finish")
    num_tokens = counted["tokens"] - counts["tokens"]
    for name, cpu_s in after.items():
        yield f"{name}: us per token", 1e6 * (cpu_s - before[name]) / num_tokens
    yield f"{pair.measured[-1].name}: messages per token", (counted["messages"] - counts["messages"]) / num_tokens


def asked(pair: Pair, streams: int = 8, repeats: int = 25) -> Iterator[tuple[str, float]]:
    """CPU per request for one token."""
    before = {one.name: one.part.cpu_s() for one in pair.measured}
    pair.client.order("begin", streams=streams, tokens=1, repeats=repeats)
    pair.client.order("finish")
    for one in pair.measured:
        yield f"{one.name}: us per request", 1e6 * (one.part.cpu_s() - before[one.name]) / (streams * repeats)


def measure(load: Load, rounds: int) -> tuple[list[Pair], Figures]:
    figures: Figures = defaultdict(list)
    with ExitStack() as parts:
        every = pairs(load, parts)
        for pair in every:
            dict(asked(pair))  # what is made once is made
        for _ in range(rounds):
            for pair in every:
                for name, figure in (*streamed(pair, load), *asked(pair)):
                    figures[name].append(figure)
            for name, figure in codec_times(load.streams):
                figures[name].append(figure)
    return every, figures


def ratio(figures: Figures, one: Measured, unit: str) -> str:
    """To the bare one, round by round: the median."""
    if not one.beside:
        return ""
    both = zip(figures[f"{one.name}: {unit}"], figures[f"{one.beside}: {unit}"], strict=True)
    return f"{statistics.median(mine / bare for mine, bare in both):.2f}"


def show(every: list[Pair], figures: Figures, console: Console) -> None:
    units = ("us per token", "us per request")
    table = Table("process", "us per token", "to bare", "us per request", "to bare", "messages per token")
    for one in (one for pair in every for one in pair.measured):
        cells = []
        for unit in units:
            cells += [f"{statistics.median(figures[f'{one.name}: {unit}']):.0f}", ratio(figures, one, unit)]
        messages = figures.get(f"{one.name}: messages per token")
        table.add_row(one.name, *cells, f"{statistics.median(messages):.2f}" if messages else "")
    console.print(table)
    for name in (name for name in figures if name.startswith("link")):
        console.print(f"{name}: {statistics.median(figures[name]):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--steps-per-s", type=float, default=50)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each pair in each round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load = Load(arguments.streams, arguments.steps_per_s, arguments.seconds)
    every, figures = measure(load, arguments.rounds)
    show(every, figures, Console(width=130))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

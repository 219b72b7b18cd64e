"""CPU per streamed token of Ray Serve's own gRPC proxy and its deployment, beside a bare grpc.aio server.

    python -m benchmarks.serve_proxy [--streams 32] [--steps-per-s 50] [--seconds 2] [--rounds 3]

What tokens would cost if they passed through Serve, on a Ray of our own. Both servers send the same prepared chunks to
the same kind of client, by turns; if Serve cannot keep the pace, its figures are those of the tokens that came. Beside
`router.py`, which starts no Ray.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack

from rich.console import Console
from rich.table import Table

from benchmarks.router import SETTLE_S, Load
from benchmarks.router_parts.part import Part

Figures = defaultdict[str, list[float]]


def streamed(client: Part, server: Part, load: Load, figures: Figures, *, is_proxied: bool) -> None:
    """CPU per token in the middle of as many streams, and the tokens a second of all of them."""

    def cpu() -> dict[str, float]:
        return server.order("cpu") if is_proxied else {"bare grpc.aio server": server.cpu_s()}

    client.order("begin", streams=load.streams, tokens=load.tokens, repeats=1)
    time.sleep(SETTLE_S)
    before, counted, began_s = cpu(), client.order("count")["tokens"], time.monotonic()
    time.sleep(load.seconds)
    after, num_tokens = cpu(), client.order("count")["tokens"] - counted
    rate = num_tokens / (time.monotonic() - began_s)
    client.order("finish")
    figures["proxied: tokens/s" if is_proxied else "bare: tokens/s"].append(rate)
    for name, cpu_s in after.items():
        figures[name].append(1e6 * (cpu_s - before[name]) / num_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--steps-per-s", type=float, default=50)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    load, figures = Load(options.streams, options.steps_per_s, options.seconds), Figures(list)
    pace = str(load.steps_per_s)
    with ExitStack() as stack:
        bare = stack.enter_context(Part("bare_server", pace, str(load.tokens)))
        proxied = stack.enter_context(Part("proxied_server", pace))
        clients = [stack.enter_context(Part("clients", "bare-async", part.address)) for part in (bare, proxied)]
        for _ in range(options.rounds):
            for client, server in zip(clients, (bare, proxied), strict=True):
                streamed(client, server, load, figures, is_proxied=server is proxied)
    table = Table("what", "median")
    for name, found in figures.items():
        table.add_row(name if "tokens/s" in name else f"{name}: us per token", f"{statistics.median(found):.0f}")
    console = Console()
    console.print(table)
    both = zip(figures["proxy"], figures["replica"], figures["bare grpc.aio server"], strict=True)
    ratio = statistics.median((proxy + replica) / bare for proxy, replica, bare in both)
    console.print(f"proxy and replica to bare: {ratio:.1f}; load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()

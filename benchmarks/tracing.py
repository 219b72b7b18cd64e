"""CPU that traces of every request cost router and replica, beside the same without traces.

    python -m benchmarks.tracing [--streams 32] [--tokens 256] [--steps-per-s 200] [--rounds 6]

No model: a replica that only counts, so that what is measured beside traces is as little as there can be. Two routers,
each with its replica, one of both pairs traced and sending its spans to a collector that throws them away. They
alternate in rounds; the table has medians, and ratios of one round.
"""

import argparse
import statistics
import threading
from collections import defaultdict
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks.router_parts.part import Part


class Collector(BaseHTTPRequestHandler):
    """Takes spans, and keeps none."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def measured(streams: int, tokens: int, steps_per_s: float, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Microseconds of CPU for each request, by pair and process, one for each round."""
    figures: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"--otlp-endpoint=http://127.0.0.1:{collector.server_address[1]}"
    with ExitStack() as parts:
        pairs: dict[str, dict[str, Part]] = {}
        for name, options in (("without", ()), ("traced", (endpoint,))):
            replica = parts.enter_context(Part("replica", str(steps_per_s), *options))
            router = parts.enter_context(Part("served_router", replica.address, *options))
            client = parts.enter_context(Part("clients", "our-async", router.address))
            pairs[name] = {"router": router, "replica": replica, "client": client}
        for number in range(rounds + 1):
            for name, pair in pairs.items():
                before = {process: part.cpu_s() for process, part in pair.items()}
                pair["client"].order("begin", streams=streams, tokens=tokens, repeats=1)
                pair["client"].order("finish")
                for process in ("router", "replica"):
                    cpu_us = 1e6 * (pair[process].cpu_s() - before[process]) / streams
                    if number:  # what is made once is made in the first round
                        figures[name, process].append(cpu_us)
    collector.shutdown()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps-per-s", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    figures = measured(arguments.streams, arguments.tokens, arguments.steps_per_s, arguments.rounds)
    for process in ("router", "replica"):
        plain, traced = figures["without", process], figures["traced", process]
        ratio = statistics.median(more / less for more, less in zip(traced, plain, strict=True))
        cost_us = statistics.median(more - less for more, less in zip(traced, plain, strict=True))
        print(
            f"{process}: {statistics.median(plain):.0f} us of CPU for a request of {arguments.tokens} tokens, "
            f"traced {statistics.median(traced):.0f} us: ratio {ratio:.3f}, {cost_us:.0f} us more"
        )


if __name__ == "__main__":
    main()

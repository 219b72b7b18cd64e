"""Benchmark of the disk below the prefix cache: a long prompt after a restart, and what writing costs running streams.

    python -m benchmarks.disk_tier [--model smollm2] [--tokens 8000] [--streams 8] [--new-tokens 96] [--json FILE]

Three processes, one after the other. The first computes a prompt and ends, which writes it down. The second, after
this restart, asks for that prompt, and for another of the same length that nobody has computed. The third decodes
streams with an empty store. Printed: seconds to the first token, of CPU time and by the clock, found and computed, and
the CPU time that copying, digests and writing take, as a share of the process's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.decoding_streams import begin_streams, cpu_times, parser_of, prompt_of
from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.worker.engine.block_mover import BlockMover
from holdfast.worker.sampling_params import SamplingParams

MOVES: Final[dict[tuple[type[Any], str], str]] = {
    (BlockMover, "_copied"): "copying",
    (BlockMover, "_write"): "writing",
    (BlockMover, "_tell_news"): "writing",
}
"""What a store costs: copies on the thread of the steps, and all of the mover's thread."""


def engine_of(arguments: argparse.Namespace, store: str) -> InferenceEngine:
    cache = {"kv_offload_disk": f"{store},4GB", "num_blocks": 3 * arguments.tokens // 16}
    return InferenceEngine(arguments.model, {"cache": cache})


def first_token(engine: InferenceEngine, prompt: list[int]) -> dict[str, Any]:
    """Seconds to the first token, the token, and how many of the prompt's tokens were found."""
    before = engine.get_stats().num_prefix_hit_tokens
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    output = engine.submit_request(prompt, params).result()
    took_s, took_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    found = engine.get_stats().num_prefix_hit_tokens - before
    return {"clock_s": took_s, "cpu_s": took_cpu_s, "token": output.outputs[0].token_ids[0], "found": found}


def compute(arguments: argparse.Namespace, store: str) -> dict[str, Any]:
    with engine_of(arguments, store) as engine:
        first = first_token(engine, prompt_of(1, arguments.tokens))
        while engine.get_stats().disk_backlog_bytes:
            time.sleep(0.1)
        return first


def ask_again(arguments: argparse.Namespace, store: str) -> dict[str, Any]:
    with engine_of(arguments, store) as engine:
        first_token(engine, prompt_of(0, 64))
        found = first_token(engine, prompt_of(1, arguments.tokens))
        computed = first_token(engine, prompt_of(2, arguments.tokens))
        return {"found": found, "computed": computed}


def write_cost(arguments: argparse.Namespace, store: str) -> dict[str, Any]:
    """CPU time of streams that decode at once, and how much of it goes to the store."""
    with cpu_times(MOVES) as spent, engine_of(arguments, store) as engine:
        first_token(engine, prompt_of(0, 64))
        before, began_cpu_s = dict(spent), time.process_time()
        for handle in begin_streams(engine, arguments):
            handle.result()
        took_s = time.process_time() - began_cpu_s
        parts = {name: value - before[name] for name, value in spent.items()}
        return {"cpu_s": took_s, **parts, "share": sum(parts.values()) / took_s}


PARTS: Final = {"compute": compute, "again": ask_again, "write": write_cost}


def part(arguments: argparse.Namespace, name: str, store: str) -> dict[str, Any]:
    """One part, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.disk_tier", *sys.argv[1:], "--part", name, "--store", store]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=arguments.timeout_s)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    """Prints both tables."""
    parser = parser_of(__doc__, 8000, 96)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="of each process")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(PARTS[arguments.part](arguments, arguments.store)))
        return
    with tempfile.TemporaryDirectory() as folder:
        first = part(arguments, "compute", f"{folder}/restart")
        again = part(arguments, "again", f"{folder}/restart")
        written = part(arguments, "write", f"{folder}/writing")
    assert again["found"]["token"] == first["token"], "the same token, computed and found"
    show(first, again, written, arguments)


def show(first: dict[str, Any], again: dict[str, Any], written: dict[str, Any], arguments: argparse.Namespace) -> None:
    found, computed = again["found"], again["computed"]
    ratios = {name: found[name] / computed[name] for name in ("cpu_s", "clock_s")}
    table = Table(f"first token of {arguments.tokens} tokens", "CPU s", "s", "tokens found")
    for name, row in (("computed", computed), ("after a restart", found)):
        table.add_row(name, f"{row['cpu_s']:.2f}", f"{row['clock_s']:.2f}", f"{row['found']:,}")
    table.add_row("after a restart / computed", f"{ratios['cpu_s']:.4f}", f"{ratios['clock_s']:.4f}", "")
    console = Console()
    console.print(table)
    console.print(
        f"{arguments.streams} streams of {arguments.new_tokens} tokens: {written['cpu_s']:.2f} s of CPU time, of which "
        f"copying {written['copying']:.3f} and digests and writing {written['writing']:.3f}: {written['share']:.1%}"
    )
    if arguments.json:
        figures = {"load": os.getloadavg(), "first": first, **again, "ratios": ratios, "writing": written}
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

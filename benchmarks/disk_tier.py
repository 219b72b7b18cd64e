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
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.worker.engine.block_mover import BlockMover
from holdfast.worker.sampling_params import SamplingParams

MIN_ID: Final = 100
MAX_ID: Final = 20_000
"""Token ids of prompts: of any vocabulary that real models have."""
STREAM_PROMPT: Final = 32


def engine_of(arguments: argparse.Namespace, store: str) -> InferenceEngine:
    cache = {"kv_offload_disk": f"{store},4GB", "num_blocks": 3 * arguments.tokens // 16}
    return InferenceEngine(arguments.model, {"cache": cache})


def prompt_of(number: int, num_tokens: int) -> list[int]:
    generator = random.Random(number)
    return [generator.randrange(MIN_ID, MAX_ID) for _ in range(num_tokens)]


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


@contextmanager
def timed_moves() -> Iterator[dict[str, float]]:
    """CPU seconds of what a store costs: copies on the thread of the steps, and all of the mover's thread."""
    spent: dict[str, float] = {"copying": 0.0, "writing": 0.0}
    originals = {name: getattr(BlockMover, name) for name in ("_copied", "_write", "_tell_news")}

    def timed(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            began_s = time.thread_time()
            try:
                return original(*given)
            finally:
                spent[kind] += time.thread_time() - began_s

        return call

    for name, original in originals.items():
        setattr(BlockMover, name, timed("copying" if name == "_copied" else "writing", original))
    try:
        yield spent
    finally:
        for name, original in originals.items():
            setattr(BlockMover, name, original)


def write_cost(arguments: argparse.Namespace, store: str) -> dict[str, Any]:
    """CPU time of streams that decode at once, and how much of it goes to the store."""
    params = SamplingParams(temperature=0.0, max_tokens=arguments.new_tokens, ignore_eos=True)
    with timed_moves() as spent, engine_of(arguments, store) as engine:
        first_token(engine, prompt_of(0, 64))
        before, began_cpu_s = dict(spent), time.process_time()
        prompts = [prompt_of(number + 3, STREAM_PROMPT) for number in range(arguments.streams)]
        handles = [engine.submit_request(prompt, params) for prompt in prompts]
        for handle in handles:
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="of each process")
    parser.add_argument("--json", type=Path)
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

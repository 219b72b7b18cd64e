"""Benchmark of a start: `holdfast generate` from the start of its process to the first token, split by phase.

    python -m benchmarks.startup [--model demo] [--against WORKTREE] [--rounds 7] [--json FILE]
    python -m benchmarks.startup --model ~/.cache/holdfast/peers/models/S    # of benchmarks/peers/models.py

Each start is a process of its own; rounds alternate between this tree and the other one (before). A tree that keeps
layouts is measured twice: `first` without any that were kept, `later` with them. Printed: medians in milliseconds,
least and most of the whole. A phase counts the main thread's time in it, without the phases inside; `imports` is what
import statements take, wherever they stand. `cpu` is the processor time of all threads until then, `peak MB` the
most memory that was resident until then.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).parent.parent
PHASES: Final = (
    *("interpreter", "imports", "settings", "config", "weights", "proof", "packing", "cache", "self-check"),
    *("router", "first step", "other"),
)
TIMEOUT_S: Final = 120

Times = dict[str, float]
"""Milliseconds by phase; also `total`, `cpu`, and `peak` in MB."""


def start_once(tree: Path, model: str, home: Path, extra: list[str]) -> Times:
    """One start of the command in `tree`, with `home` for what it keeps."""
    environ = dict(os.environ, PYTHONPATH=f"{tree}:{tree / 'proto'}", HOME=str(home))
    code = (Path(__file__).parent / "startup_probe.py").read_text()
    arguments = ["generate", "The capital of France is", "--model", model, "--max-tokens", "1", *extra]
    begun_ns = time.monotonic_ns()
    done = subprocess.run(
        [sys.executable, "-c", code, str(begun_ns), *arguments],
        cwd=tree,
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    report = [line for line in done.stderr.splitlines() if line.startswith("startup: ")]
    if not report:
        raise SystemExit(f"{tree}: no token came\n{done.stderr}")
    times: Times = json.loads(report[0].removeprefix("startup: "))
    times["other"] = times["total"] - sum(value for name, value in times.items() if name in PHASES)
    return times


def empty_home(folder: str) -> Path:
    """A home with the compiled libraries of this user's, and nothing else that was kept."""
    kept = Path(folder) / ".cache" / "holdfast"
    kept.mkdir(parents=True)
    (kept / "native").symlink_to(Path.home() / ".cache" / "holdfast" / "native")
    return Path(folder)


def first_start(tree: Path, model: str, extra: list[str]) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        return start_once(tree, model, empty_home(folder), extra)


def measure(trees: dict[str, Path], model: str, rounds: int, extra: list[str]) -> dict[str, list[Times]]:
    """The starts of all rounds, by tree and kind. Before them each tree starts once: that fills the system's caches."""
    runs: dict[str, list[Times]] = {}
    with tempfile.TemporaryDirectory() as folder:
        homes = {}
        for name, tree in trees.items():
            homes[name] = empty_home(f"{folder}/{name}")
            start_once(tree, model, homes[name], extra)
        for _ in range(rounds):
            for name, tree in trees.items():
                keeps = (homes[name] / ".cache" / "holdfast" / "layouts").exists()
                runs.setdefault(f"{name}, first" if keeps else name, []).append(first_start(tree, model, extra))
                if keeps:
                    runs.setdefault(f"{name}, later", []).append(start_once(tree, model, homes[name], extra))
    return runs


def print_table(runs: dict[str, list[Times]]) -> None:
    table = Table("ms", *runs)
    for row in (*PHASES, "total", "cpu", "peak MB"):
        phase = row.removesuffix(" MB")
        cells = [[times.get(phase, 0.0) for times in starts] for starts in runs.values()]
        spread = phase == "total"
        shown = [f"{statistics.median(c):.0f}" + (f" [{min(c):.0f}..{max(c):.0f}]" if spread else "") for c in cells]
        table.add_row(row, *shown)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--against", type=Path, help="another checkout, whose libraries are compiled: before")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where all starts are written to")
    parser.add_argument("extra", nargs="*", help="more arguments of `holdfast generate`, after --")
    options = parser.parse_args()
    trees = {"before": options.against.resolve()} if options.against else {}
    runs = measure({**trees, "now": ROOT}, options.model, options.rounds, options.extra)
    print_table(runs)
    if options.json:
        machine: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()}
        options.json.write_text(json.dumps({"machine": machine, "starts": runs}, indent=1))


if __name__ == "__main__":
    main()

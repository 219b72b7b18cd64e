"""Benchmark of one sum between two ranks of a host: what it costs beyond the later of both.

    python -m benchmarks.all_reduce [--elements 256 1024 4096] [--sums 5000] [--work-us 50]

Compiles `all_reduce.cpp` around the executor's own exchange (`worker/executors/cpu/native/exchange.h`). Two processes
work for a random while up to `--work-us`, and sum a row of float32. The table has microseconds from the later arrival
until both have the sum; `on one core` has both ranks there, where a sum must wait for the other's turn. The first
hundredth of the sums is left out.
"""

import argparse
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from holdfast.worker.executors.cpu.build import SOURCES, find_compiler

SOURCE: Final = Path(__file__).with_name("all_reduce.cpp")
TIMEOUT_S: Final = 120


def compiled(folder: Path) -> Path:
    program = folder / "all_reduce"
    sources = [str(SOURCE), str(SOURCES / "pool.cpp")]
    command = [
        *find_compiler(),
        "-std=c++17",
        "-O3",
        "-mavx2",
        f"-I{SOURCES}",
        *sources,
        "-lpthread",
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    return program


def measure(program: Path, elements: int, sums: int, work_us: int, *, on_one_core: bool) -> tuple[list[float], float]:
    """Microseconds of each sum, ascending; and of CPU time for each of both ranks, without the work."""
    arguments = [str(value) for value in (elements, sums, work_us, int(on_one_core))]
    done = subprocess.run([program, *arguments], check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    times = [int(line) / 1000 for line in done.stdout.split()][sums // 100 :]
    cpu = sum(int(word) for word in done.stderr.split()) / 2 / 1000 / sums
    return sorted(times), cpu - work_us / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--elements", type=int, nargs="+", default=[256, 512, 1024, 4096])
    parser.add_argument("--sums", type=int, default=5000)
    parser.add_argument("--work-us", type=int, default=50)
    options = parser.parse_args()
    table = Table("ranks", "row", "p10", "median", "p90", "p99", "CPU", title="microseconds of a sum")
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder))
        for on_one_core in (False, True):
            for elements in options.elements:
                times, cpu = measure(program, elements, options.sums, options.work_us, on_one_core=on_one_core)
                shown = [times[int(len(times) * part)] for part in (0.1, 0.5, 0.9, 0.99)]
                where = "on one core" if on_one_core else "on two cores"
                table.add_row(where, str(elements), *(f"{value:.1f}" for value in (*shown, cpu)))
    console = Console()
    console.print(table)
    console.print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()

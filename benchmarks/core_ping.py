"""Time that a word takes from one core to another: far less where both share a cache. A host places virtual cores, and
moves them.

    python -m benchmarks.core_ping        prints nanoseconds between the first two cores that this process may use
"""

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from holdfast.worker.executors.cpu.build import find_compiler

SOURCE: Final = Path(__file__).with_suffix(".cpp")
TIMEOUT_S: Final = 60


def ping_ns() -> float | None:
    """Nanoseconds between the first two cores that this process may use, on average to and fro; None: it has one."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "core_ping"
        command = [*find_compiler(), "-std=c++17", "-O2", str(SOURCE), "-lpthread", "-o", str(program)]
        subprocess.run(command, check=True)
        done = subprocess.run(
            [program, *map(str, cores)], check=True, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    return float(done.stdout)


def main() -> None:
    found = ping_ns()
    print("one core" if found is None else f"{found:.0f} ns")


if __name__ == "__main__":
    main()

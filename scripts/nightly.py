"""The nightly run: every test, simulations, fuzzing, others' schemas and suites; whole, or one of six equal parts.

    python -m scripts.nightly [PART/PARTS]

A part has each PARTS-th file of tests, by the files' names, and a share of all else. It goes on after what fails, says
at the end what did, and how long each command took.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
NUM_SEEDS: Final = 10_000
FUZZ_MINUTES: Final = 10
SHARED: Final = ("-n", "2", "--dist", "loadscope", "--no-loadscope-reorder")
"""Options of pytest for tests in two processes, a file at a time, as in `make test`."""


def files_of(part: int, num_parts: int) -> list[str]:
    """Those of part `part`, from 1."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    return files[part - 1 :: num_parts]


def commands(part: int, num_parts: int) -> list[list[str]]:
    """Each with its arguments."""
    python, holdfast = [sys.executable, "-m"], str(Path(sys.executable).parent / "holdfast")
    first, last = (NUM_SEEDS * number // num_parts for number in (part - 1, part))
    once: list[list[str]] = [["tests.router.schemas.corpus"], ["scripts.vllm_suite.run"]]
    return [
        [*python, "pytest", "-q", *SHARED, *files_of(part, num_parts)],
        [holdfast, "simulate", "--seeds", f"{first}:{last}", "--jobs", "0", "--max-failures", "10"],
        [*python, "tests.fuzz", "--minutes", f"{FUZZ_MINUTES / num_parts:.2f}"],
        *([*python, *command] for command in once[part - 1 :: num_parts]),
    ]


def read_part(arguments: Sequence[str]) -> tuple[int, int]:
    """Which part of how many; without an argument the whole. Raises `ValueError`."""
    if not arguments:
        return 1, 1
    part, _, num_parts = arguments[0].partition("/")
    if not (part.isdecimal() and num_parts.isdecimal() and 1 <= int(part) <= int(num_parts)):
        raise ValueError(f"PART = {arguments[0]!r}: must be K/N with 1 <= K <= N, such as 3/6")
    return int(part), int(num_parts)


def main() -> None:
    try:
        part, num_parts = read_part(sys.argv[1:])
    except ValueError as error:
        raise SystemExit(str(error)) from None
    ended: list[str] = []
    is_red = False
    for command in commands(part, num_parts):
        said = " ".join(Path(word).name for word in command[:7])
        print(f"\n== {said}", flush=True)
        began_at = time.monotonic()
        code = subprocess.run(command, cwd=ROOT).returncode
        is_red = is_red or code != 0
        ended.append(
            f"{'ended with ' + str(code) if code else 'passed':>14}, {time.monotonic() - began_at:6.0f} s: {said}"
        )
    print(f"\npart {part} of {num_parts}", *ended, sep="\n")
    raise SystemExit(int(is_red))


if __name__ == "__main__":
    main()

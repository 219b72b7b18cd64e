"""The tests that only a GPU can run: parity, bits at any number of rows, graphs against single launches, draws.

    python -m benchmarks.gpu.exactness

Runs `tests/gpu` in a process of its own, and tells how many passed, failed and were left out, by test.
"""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

import torch

from benchmarks.gpu.findings import Findings, Row, machine, parser_of, tell

TESTS = "tests/gpu"


def main() -> None:
    options = parser_of(__doc__).parse_args()
    tell(measure(torch.device(options.device)), options.json)


def measure(device: torch.device, tests: str = TESTS) -> Findings:
    """Of a checkout, from its root. On a CPU all are left out. Raises RuntimeError where pytest itself fails."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", tests, f"--junitxml={report}", "-p", "no:cacheprovider"]
        done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True)
        if not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        rows = _rows(report)
    return Findings(title="Exactness", machine=machine(device), rows=rows)


def _rows(report: Path) -> tuple[Row, ...]:
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "").split("[")[0] or case.get("classname", "")
        found = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcomes[name]["left out" if found == {"skipped"} else "failed" if found else "passed"] += 1
    return tuple(
        {"test": name, **{what: counts[what] for what in ("passed", "failed", "left out")}}
        for name, counts in outcomes.items()
    )


if __name__ == "__main__":
    main()

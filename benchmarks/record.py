"""Record of a benchmark: what it printed and measured, with command, commit, machine and load, as a JSON file to keep.

    python -m benchmarks.record NAME MODULE [OPTIONS OF THE BENCHMARK]
    python -m benchmarks.record router benchmarks.router --seconds 1.2 --rounds 6

Writes `benchmarks/results/NAME.json` once the benchmark has ended well. `figures` is what it writes by its own `--json`
or `--out`; null where it has neither. A page that shows figures links the file (`tests/benchmarks/test_record.py`).
"""

import datetime
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.machine import commit, describe_machine

RESULTS: Final = Path(__file__).parent / "results"
_WIDTH: Final = "120"  # columns of the printed tables


def record(name: str, module: str, arguments: list[str], folder: Path = RESULTS) -> Path:
    """Runs `python -m module arguments` and returns the file. Raises `CalledProcessError` where the benchmark fails."""
    facts: dict[str, Any] = {
        "command": shlex.join(["python", "-m", module, *arguments]),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "load": [os.getloadavg()[0]],
    }
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "figures.json"
        option = option_for_figures(module)
        command = [sys.executable, "-m", module, *arguments, *([option, str(out)] if option else ())]
        began_s = time.monotonic()
        printed = _shown(command)
        facts["seconds"] = round(time.monotonic() - began_s, 1)
        facts["load"].append(os.getloadavg()[0])
        facts |= {"figures": json.loads(out.read_text()) if out.exists() else None, "printed": printed}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    part = path.with_suffix(".part")
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    part.write_text(text.replace(f"{scratch}/", "").replace(str(Path.home()), "~") + "\n")  # no path of this machine
    return part.replace(path)


def option_for_figures(module: str) -> str | None:
    """`--json` or `--out`, by which the benchmark writes its figures; `None` where it writes none."""
    found = importlib.util.find_spec(module)
    source = Path(found.origin).read_text() if found is not None and found.origin is not None else ""
    return next((option for option in ("--json", "--out") if f'"{option}"' in source), None)


def _shown(command: list[str]) -> list[str]:
    """Lines that the command prints, which are passed on to this terminal as they come."""
    lines = []
    environment = os.environ | {"COLUMNS": _WIDTH}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stdout is not None, "it is a pipe"
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)
    return lines


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit((__doc__ or "").partition("\n\n")[2].partition("\n\n")[0])
    name, module, *arguments = sys.argv[1:]
    print(f"written to {record(name, module, arguments)}")


if __name__ == "__main__":
    main()

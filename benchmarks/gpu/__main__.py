"""All GPU measurements, one after the other, and a report to be committed.

    python -m benchmarks.gpu [--model 8b] [--out benchmarks/gpu/results]

Each runs in a process of its own for ten minutes at most, so that one that fails or hangs ends nothing else. Needs no
network. Writes DEVICE.json and DEVICE.md.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gpu.findings import Findings, machine, read
from benchmarks.gpu.models import MODELS

LIMIT_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each figure of a step")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the report")
    parser.add_argument("--only", nargs="*", help="names of measurements; all without it")
    options = parser.parse_args()
    shared = ["--device", options.device]
    model = ["--model", options.model]
    mixture = ["--model", "tiny" if options.model == "tiny" else "30b-a3b"]
    small = ["--model", "tiny" if options.model == "tiny" else "0.6b"]
    commands = {
        "exactness": ["exactness", *shared],
        "steps": ["steps", *shared, *model, "--seconds", str(options.seconds)],
        "steps in fp8": ["steps", *shared, *model, "--seconds", str(options.seconds), "--kv-cache-dtype", "fp8"],
        "mixture": ["steps", *shared, *mixture, "--seconds", str(options.seconds)],
        "serving": ["serving", *shared, *model],
        "hf": ["serving", *shared, *model, "--executor", "hf"],
        "transformers": ["transformers_batching", *shared, *model],
        "lost rank": ["lost_rank", *shared, *small],
    }
    chosen = {name: command for name, command in commands.items() if not options.only or name in options.only}
    found = [run(name, command) for name, command in chosen.items()]
    print(f"written: {write(found, machine(torch.device(options.device)), options.out)}")
    return int(any(isinstance(one, str) for one in found))


def run(name: str, command: list[str], limit_s: float = LIMIT_S) -> Findings | str:
    """What a measurement has found; or why it has not."""
    print(f"== {name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "findings.json"
        module, *flags = command
        try:
            done = subprocess.run(
                [sys.executable, "-m", f"benchmarks.gpu.{module}", *flags, "--json", str(file)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return f"{name}: not done in {limit_s:.0f} s"
        print(done.stdout, flush=True)
        if done.returncode or not file.exists():
            last = (done.stdout.strip().splitlines() or ["no word"])[-1]
            return f"{name}: {last}"
        return read(file)


def write(found: list[Findings | str], device: str, folder: Path) -> Path:
    """Writes the report, and returns the path of its Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (re.sub(r"[^a-z0-9]+", "-", device.split(";")[0].lower()).strip("-") + ".md")
    done = [one for one in found if isinstance(one, Findings)]
    missing = [one for one in found if isinstance(one, str)]
    content = {"machine": device, "findings": [asdict(one) for one in done], "not done": missing}
    path.with_suffix(".json").write_text(json.dumps(content, indent=2) + "\n")
    parts = [f"# {device}", "", *(one.markdown() for one in done)]
    if missing:
        parts += ["## Not done", "", *(f"- {reason}" for reason in missing), ""]
    path.write_text("\n".join(parts))
    return path


if __name__ == "__main__":
    sys.exit(main())

"""Benchmark of Holdfast against its peers on one machine: same prompts by token id, runs in turns, ratios of one run.

    python -m benchmarks.peers.run [--models S,M] [--cases a,b,c,d,e] [--rounds 3] [--peers vllm,openvino,...]
                                   [--out results.json] [--setting max_num_seqs=32]

Peers are installed by `python -m benchmarks.peers.install`; `benchmarks/peers/README.md` tells what is measured.
"""

import argparse
import datetime
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.peers import quantized_models
from benchmarks.peers.alternation import Limits
from benchmarks.peers.cases import chosen_cases
from benchmarks.peers.folders import Folders
from benchmarks.peers.machine import commit, describe_machine
from benchmarks.peers.peers import DEFAULT_PEERS, OURS, PEERS, chosen_peers
from benchmarks.peers.results import ModelResult
from benchmarks.peers.session import Session
from benchmarks.peers.tables import legend, sheets

MODELS: Final = quantized_models.PLAIN
_PIPE_WIDTH: Final = 160
_REPOSITORY: Final = Path(__file__).parents[2]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # the servers are ended on the way out
    options = _options()
    started_s = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started_s:6.1f} s] {text}", flush=True)

    session = Session(
        folders=Folders(options.folder),
        peers=options.peers,
        cases=options.cases,
        limits=Limits(rounds=options.rounds, patience_s=options.patience, noise=options.noise),
        say=say,
        ours=options.setting,
    )
    report = Report(options, _bandwidth())
    for model in options.models:
        report.models[model] = ModelResult()
        session.run(model, report.models[model], report.store)
    report.show(say)


class Report:
    """All results so far, as a file and as tables."""

    def __init__(self, options: argparse.Namespace, bandwidth_gb_s: float) -> None:
        self.models: dict[str, ModelResult] = {}
        self._out: Path | None = options.out
        self._noise: float = options.noise
        self._bandwidth_gb_s = bandwidth_gb_s
        self._facts: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", "benchmarks.peers.run", *sys.argv[1:]]),
            "commit": commit(),
            "machine": describe_machine() | {"bandwidth_gb_s": bandwidth_gb_s},
            "limits": {"rounds": options.rounds, "patience_s": options.patience, "noise": options.noise},
            "settings": options.setting,
        }

    def store(self) -> None:
        """Writes the file, whole or not at all: what is there is kept if a later case fails."""
        if self._out is None:
            return
        models = {name: result.as_json() for name, result in self.models.items()}
        part = self._out.with_name(f"{self._out.name}.part")
        part.write_text(json.dumps(self._facts | {"models": models, "tables": self.markdown()}, indent=1))
        part.replace(self._out)

    def markdown(self) -> str:
        tables = [sheet.markdown() for name in self.models for sheet in self._sheets(name)]
        machine = self._facts["machine"]
        head = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {self._facts['date'][:10]}"
        return "\n".join(
            [f"{head}: `{self._facts['command']}`", "", *tables, legend(self.models.values(), self._noise)]
        )

    def show(self, say: Any) -> None:
        """The tables on the terminal; beside the JSON they are also stored as markdown."""
        console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
        for name in self.models:
            for sheet in self._sheets(name):
                console.print(sheet.rich(), markup=False, highlight=False)
        console.print(legend(self.models.values(), self._noise), highlight=False, markup=False)
        if self._out is not None:
            page = self._out.with_suffix(".md")
            page.write_text(self.markdown() + "\n")
            say(f"written to {self._out} and {page}")

    def _sheets(self, model: str) -> list[Any]:
        return list(sheets(model, self.models[model], OURS.name, self._bandwidth_gb_s))


def _options() -> argparse.Namespace:
    usual = Limits()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="S,M")
    parser.add_argument("--cases", default="a,b,c,d,e")
    parser.add_argument("--peers", default=",".join(DEFAULT_PEERS), help=f"of {', '.join(PEERS)}; empty: ours alone")
    parser.add_argument("--rounds", type=int, default=usual.rounds)
    parser.add_argument("--patience", type=float, default=usual.patience_s, help="seconds of a peer for a case")
    parser.add_argument("--noise", type=float, default=usual.noise, help="share of the machine others may take")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE", help="of LLM; may be repeated")
    parser.add_argument("--out", type=Path, help="JSON file; the tables go beside it as markdown")
    parser.add_argument("--folder", type=Path, default=Folders().root)
    options = parser.parse_args()
    try:
        options.cases = chosen_cases(options.cases)
        options.peers = chosen_peers(options.peers) if options.peers else []
        options.models = _models(options.models)
        options.setting = dict(_setting(pair) for pair in options.setting)
    except ValueError as error:
        parser.error(str(error))
    if options.rounds < 1:
        parser.error(f"rounds: {options.rounds}: must be at least 1")
    if options.out is not None and not options.out.resolve().parent.is_dir():
        parser.error(f"out: {options.out}: there is no such folder")
    return options


def _models(names: str) -> list[str]:
    named = (quantized_models.is_gguf, quantized_models.is_folder)
    if unknown := [one for one in names.split(",") if one not in MODELS and not any(is_one(one) for is_one in named)]:
        known = f"{', '.join(MODELS)}, and {quantized_models.known_names()}"
        raise ValueError(f"models: no such model: {', '.join(unknown)}; there are {known}")
    return names.split(",")


def _setting(pair: str) -> tuple[str, object]:
    name, equals, value = pair.partition("=")
    if not (name and equals):
        raise ValueError(f"setting: {pair}: must be NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _bandwidth() -> float:
    command = [sys.executable, "-m", "benchmarks.peers.bandwidth"]
    return float(subprocess.run(command, capture_output=True, text=True, cwd=_REPOSITORY, check=True).stdout)


if __name__ == "__main__":
    main()

"""LoRA adapters beside vLLM's on CPUs: tokens per second of bursts whose requests have adapters in turn, and without.

    python -m benchmarks.adapters_beside [MODEL] [--adapters 8 32] [--rank 16] [--rounds 3] [--json FILE]

MODEL is one of `benchmarks.peers` (M). vLLM is installed by `python -m benchmarks.peers.install vllm`. A burst has one
request for each adapter, random and of all linears, 32 tokens in and 64 out. Bursts of vLLM and ours alternate, with
the same prompts, and the one that is not asked is paused. The ratio is ours to theirs.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import adapters
from benchmarks.peers.alternation import Alternation, Limits
from benchmarks.peers.cases import Case
from benchmarks.peers.folders import Folders
from benchmarks.peers.launch import reason_to_leave_out, start
from benchmarks.peers.machine import settle
from benchmarks.peers.peers import OURS, PEERS
from benchmarks.peers.results import CaseResult
from benchmarks.peers.server import Server

PEER: Final = "vllm"
PROMPT_TOKENS: Final = 32
TOKENS: Final = 64


def case_of(num_rows: int) -> Case:
    return Case(name=f"{num_rows}", num_requests=num_rows, num_prompt_tokens=PROMPT_TOKENS, max_tokens=TOKENS)


def servers(folders: Folders, model: str, paths: Sequence[str], rank: int) -> list[Server]:
    """Ours and the peer, with these adapters."""
    settings: dict[str, object] = {"adapters": list(paths), "rank": rank} if paths else {}
    found = []
    for peer in (OURS, PEERS[PEER]):
        own = replace(peer, settings={**peer.settings, **settings})
        found.append(start(own, folders, model, {}, folders.log(f"{peer.name}-{model}-adapters")))
        found[-1].await_ready()
        found[-1].pause()
    return found


def measure(folders: Folders, model: str, case: Case, paths: Sequence[str], given: argparse.Namespace) -> CaseResult:
    """One case by both, with one adapter for each of its requests, or without."""
    vocab_size = int(json.loads((folders.served(model) / "config.json").read_text())["vocab_size"])
    ours, theirs = servers(folders, model, paths, given.rank)
    try:
        limits = Limits(rounds=given.rounds, patience_s=60.0)
        return Alternation(
            ours, [theirs], vocab_size, limits, settle=lambda: settle(limits.noise, 10.0), say=print
        ).measure(case)
    finally:
        ours.close()
        theirs.close()


def show(found: dict[str, CaseResult], console: Console) -> None:
    table = Table("rows", "tokens/s", PEER, "ratio")
    for name, result in found.items():
        comparison = result.comparisons[PEER]
        if comparison.rate is None or comparison.ratio is None or result.our_rate is None:
            table.add_row(name, "", comparison.error, "")
            continue
        ratio = f"{comparison.ratio.median:.2f} ({comparison.ratio.least:.2f} to {comparison.ratio.most:.2f})"
        table.add_row(name, f"{result.our_rate.median:.0f}", f"{comparison.rate.median:.0f}", ratio)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="M")
    parser.add_argument("--adapters", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    folders = Folders()
    if reason := reason_to_leave_out(PEERS[PEER], folders, given.model):
        parser.error(f"{PEER}: {reason}")
    found: dict[str, CaseResult] = {}
    with tempfile.TemporaryDirectory() as folder:
        made = adapters.Folders(folders.served(given.model), Path(folder), given.rank, torch.bfloat16)
        paths = [made.write(number).path for number in range(1, max(given.adapters) + 1)]
        for count in given.adapters:
            case = case_of(count)
            found[f"{count}, with {count} adapters"] = measure(folders, given.model, case, paths[:count], given)
            found[f"{count}, without LoRA"] = measure(folders, given.model, case, [], given)
    show(found, Console())
    print(f"load {os.getloadavg()[0]:.1f}")
    if given.json:
        figures: dict[str, Any] = {name: asdict(result) for name, result in found.items()}
        given.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

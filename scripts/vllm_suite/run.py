"""Others' suites against a served Holdfast: vLLM's tests and examples, and the tests of OpenAI's client.

    python -m scripts.vllm_suite.run [FOLDER] [--only tests,examples,openai] [--model FOLDER]

They are fetched from the package index into FOLDER, unless they are there. Counts what passed, what failed, and what
is a known difference (`differences.txt`). Exit code: 1 where a test failed that should not, 3 where the suites cannot
be fetched.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from holdfast.cluster.bundled_model.bundled_model import BUNDLED, bundled_path
from scripts.served import end_on_sigterm, served
from scripts.vllm_suite.differences import Difference, difference_of, read
from scripts.vllm_suite.fetch import OPENAI, VLLM, CannotFetchError, fetch, fetch_tools
from scripts.vllm_suite.suites import SUITES, Outcome, Server

CANNOT_FETCH: Final = 3
MODEL: Final = "served"
CONTEXT: Final = 8192
"""What the tests count on; the bundled model was trained on less."""
COLUMNS: Final = ("passed", "failed", "known difference", "skipped")


def settings(model: str) -> dict[str, Any]:
    """Of the server that is asked."""
    one: dict[str, Any] = {"model": {"model": model, "served_model_name": MODEL}}
    if model == BUNDLED:
        one["model"]["hf_overrides"] = {"max_position_embeddings": CONTEXT}
    return {"cluster": {"models": [one]}, "cache": {"kv_cache_memory": "64MiB"}}


def judged(outcomes: Sequence[Outcome], differences: Sequence[Difference]) -> tuple[Counter[str], list[Outcome]]:
    """Counts, and the failures that no difference explains."""
    counts, unknown = Counter[str](), []
    for one in outcomes:
        known = one.outcome == "failed" and difference_of(one.test, differences) is not None
        counts["known difference" if known else one.outcome] += 1
        if one.outcome == "failed" and not known:
            unknown.append(one)
    return counts, unknown


def outlived(outcomes: Sequence[Outcome], differences: Sequence[Difference]) -> list[Difference]:
    """Differences under which nothing failed, though tests that fall under them were run."""
    passed = {difference_of(one.test, differences) for one in outcomes if one.outcome == "passed"}
    failed = {difference_of(one.test, differences) for one in outcomes if one.outcome == "failed"}
    return [one for one in differences if one in passed - failed]


def ask(folder: Path, names: Sequence[str], model: Path | None, console: Console) -> int:
    """Runs suites, and reports what came of them. Returns how many tests failed that should not.

    Raises `CannotFetchError`.
    """
    tools = fetch_tools(folder)
    roots = {name: _root(name, folder, tools) for name in names}
    with served(settings(BUNDLED if model is None else str(model.resolve()))) as url:
        server = Server(url, MODEL, model or bundled_path(BUNDLED))
        found = {name: SUITES[name](root, tools, server) for name, root in roots.items()}
    num_unknown = sum(report(name, outcomes, console) for name, outcomes in found.items())
    counts, _ = judged([one for outcomes in found.values() for one in outcomes], read())
    console.print(counted("all", counts), highlight=False)
    return num_unknown


def _root(name: str, folder: Path, tools: Path) -> Path:
    return fetch("openai", OPENAI, folder, tools) if name == "openai" else fetch("vllm", VLLM, folder, tools)


def report(name: str, outcomes: Sequence[Outcome], console: Console) -> int:
    """Prints each failure that is not known, and counts. Returns how many such failures there are."""
    differences = read()
    counts, unknown = judged(outcomes, differences)
    for one in unknown:
        console.print(f"failed: {one.test}: {one.why}", markup=False, highlight=False)
    for gone in outlived(outcomes, differences):
        console.print(f"no difference any more: {gone.beginning}", markup=False, highlight=False)
    console.print(counted(name, counts), highlight=False)
    return len(unknown) + (not outcomes)


def counted(name: str, counts: Counter[str]) -> str:
    return f"{name}: {', '.join(f'{counts[column]} {column}' for column in COLUMNS)}"


def main() -> int:
    end_on_sigterm()
    parser = argparse.ArgumentParser(description="Others' suites against a served Holdfast.")
    parser.add_argument("folder", type=Path, nargs="?", help="where the suites are, or are fetched to")
    parser.add_argument("--only", default=",".join(SUITES), help="suites, of: " + ", ".join(SUITES))
    parser.add_argument("--model", type=Path, help="a model's folder; unset: the bundled model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() if arguments.folder is None else nullcontext(arguments.folder) as folder:
        try:
            console = Console(soft_wrap=True)
            return min(ask(Path(folder).resolve(), arguments.only.split(","), arguments.model, console), 1)
        except CannotFetchError as error:
            print(f"the suites cannot be fetched: {error}", file=sys.stderr)
            return CANNOT_FETCH


if __name__ == "__main__":
    sys.exit(main())

"""Small cases of users' reports against this checkout: each says RIGHT or WRONG, and a table and counts say it of all.

    python -m scripts.field_cases FOLDER [--models FOLDER] [--smollm2 FOLDER] [--only http/09,core]

FOLDER has the cases as scripts in `http`, `vllm`, `core` and `models`. Those of the first two ask one `holdfast serve`
of the models that `FOLDER/http/make_models.py SMOLLM2 MODELS` makes, unless `--models` has them; the others start what
they need. Exit code: 0 where all are RIGHT, 2 where the others cannot be run, else 1.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from scripts.served import end_on_sigterm, served, stop

ROOT: Final = Path(__file__).resolve().parent.parent
SERVED: Final = ("http", "vllm")
ROOMS: Final = (*SERVED, "core", "models")
CASE_S: Final = 300.0
SETTINGS: Final[Mapping[str, Any]] = {
    "cache": {"kv_cache_memory": "64MiB"},
    "router": {"http_cors_origin": ["http://localhost:3000"]},
}
RIGHT, WRONG, GONE = "RIGHT", "WRONG", "CANNOT BE RUN"

SHOWS: Final[Mapping[str, str]] = {
    "core/02": r"\A(?!.*'back')",
    "core/03": r"reader still blocked after 3 s: False",
    "core/05": r"got a token: arrived 0 .*after a cancelled one: arrived 0 ",
    "core/07": r"still retrying after (5\d|6[0-5]) s",
    "core/09": r"4294967296, .*InvalidRequestError .*min_tokens = 4294967296: must be at most .*top_k.* ok ",
}
"""What the right values look like, of cases that print values and no verdict."""

TESTS: Final[Mapping[str, str]] = {
    "core/01": "tests/router/api/test_request_identity.py",
    "core/02": "tests/router/dispatch/test_dispatch_host.py",
    "core/03": "tests/cluster/client/test_handover.py",
    "core/05": "tests/router/dispatch/test_sleeping_models.py",
    "core/06": "tests/worker/executors/test_rendezvous.py",
    "core/09": "tests/router/api/grpc/test_refusals.py",
}
"""Tests of the same, which are run where a case imports names that this version does not have."""

_GONE: Final = re.compile(
    r"(?:ImportError|ModuleNotFoundError|AttributeError): .*holdfast.*|AttributeError: .*has no .*"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a case."""

    case: str
    verdict: str
    line: str
    seconds: float


def judged(case: str, code: int | None, output: str) -> tuple[str, str]:
    """The verdict and the line that says it, of a case's exit code (None: it ran out of time) and output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else "it printed nothing"
    if code is None:
        return WRONG, f"not over in time; {last}"
    if code and _GONE.match(last) and not any(re.match("right|wrong", line, re.IGNORECASE) for line in lines):
        return GONE, last
    said = next((line for line in reversed(lines) if re.match("right|wrong", line, re.IGNORECASE)), None)
    if said is not None:
        return (RIGHT if code == 0 and said.upper().startswith(RIGHT) else WRONG), said
    shape = SHOWS.get(case[: case.index("/") + 3])
    is_right = code == 0 and shape is not None and re.search(shape, output, re.DOTALL)
    return (RIGHT if is_right else WRONG), "; ".join(lines[-3:]) if shape else f"no verdict: {last}"


class Cases:
    """The cases of a folder, and how one is run."""

    def __init__(self, folder: Path, only: Sequence[str], limit_s: float) -> None:
        self._folder, self._limit_s = folder, limit_s
        found = [path.relative_to(folder) for room in ROOMS for path in sorted((folder / room).glob("[0-9]*.py"))]
        names = [str(path.with_suffix("")) for path in found]
        self.names = [name for name in names if not only or name.startswith(tuple(only))]

    def run(self, case: str, url: str, model: str) -> Verdict:
        started_s = time.monotonic()
        command = [sys.executable, str(self._folder / f"{case}.py"), *([url] if url else [])]
        verdict, line = judged(case, *self._run(command, url, model))
        test = TESTS.get(case[: case.index("/") + 3])
        if verdict == GONE and test is not None:
            code, _ = self._run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test], "", "")
            verdict, line = (RIGHT if code == 0 else WRONG), f"by {test}; the case itself: {line}"
        return Verdict(case, verdict, line, time.monotonic() - started_s)

    def _run(self, command: Sequence[str], url: str, model: str) -> tuple[int | None, str]:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "HOLDFAST_URL": url, "HOLDFAST_MODEL": model}
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, text=True, start_new_session=True
            )
            try:
                code = process.wait(self._limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                stop(process, 60.0)
            output.seek(0)
            return code, output.read()


@contextmanager
def models_at(folder: Path, models: Path | None, smollm2: Path | None) -> Iterator[dict[str, Any]]:
    """The settings that serve the cases' models, which are made where `models` has none."""
    with nullcontext(models) if models is not None else tempfile.TemporaryDirectory() as place:
        made = Path(place) / "serve.yaml"
        if not made.exists():
            if smollm2 is None:
                raise SystemExit("models are made of SmolLM2: say --models or --smollm2 (FOLDER/README.md)")
            subprocess.run([sys.executable, folder / "http/make_models.py", smollm2, place], check=True)
        yield {**yaml.safe_load(made.read_text()), **SETTINGS}


def only_needed(settings: dict[str, Any], sources: str) -> dict[str, Any]:
    """The settings without models that no case names; the first stays."""
    first, *others = settings["cluster"]["models"]
    needed = [model for model in others if f'"{model["model"]["served_model_name"]}"' in sources]
    return {**settings, "cluster": {**settings["cluster"], "models": [first, *needed]}}


def run(arguments: argparse.Namespace, console: Console) -> list[Verdict]:
    cases = Cases(arguments.folder.resolve(), [part for part in arguments.only.split(",") if part], arguments.case_s)
    asked = [name for name in cases.names if name.startswith(SERVED)]
    found: list[Verdict] = []
    with Progress(console=console) as bars:
        task = bars.add_task("cases", total=len(cases.names))

        def ask(names: Sequence[str], url: str = "", model: str = "") -> None:
            for name in names:
                bars.update(task, description=name)
                found.append(cases.run(name, url, model))
                console.print(f"{name}: {found[-1].verdict}", highlight=False)
                bars.advance(task)

        if asked:
            sources = "".join((arguments.folder / f"{name}.py").read_text() for name in asked)
            with (
                models_at(arguments.folder, arguments.models, arguments.smollm2) as made,
                served(settings := only_needed(made, sources)) as url,
            ):
                ask(asked, url, settings["cluster"]["models"][0]["model"]["served_model_name"])
        ask([name for name in cases.names if name not in asked])
    return found


def table(found: Sequence[Verdict]) -> Table:
    shown = Table("case", "verdict", "seconds", "says")
    colors = {RIGHT: "green", WRONG: "red", GONE: "yellow"}
    for one in found:
        shown.add_row(one.case, Text(one.verdict, colors[one.verdict]), f"{one.seconds:.1f}", Text(one.line[:300]))
    return shown


def main() -> int:
    end_on_sigterm()
    parser = argparse.ArgumentParser(description="Small cases of users' reports, RIGHT or WRONG.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", type=Path, help="where make_models.py has written, or is to write")
    parser.add_argument("--smollm2", type=Path, help="Hugging Face folder of which models are made")
    parser.add_argument("--only", default="", help="beginnings of cases' names, such as http/09,core")
    parser.add_argument("--case-s", type=float, default=CASE_S, help="seconds after which a case is ended")
    console = Console(width=None if sys.stdout.isatty() else 160)
    found = run(parser.parse_args(), console)
    console.print(table(found))
    counts = Counter(one.verdict for one in found)
    console.print(
        f"{len(found)} cases: {', '.join(f'{counts[verdict]} {verdict}' for verdict in (RIGHT, WRONG, GONE))}"
    )
    return 0 if found and counts[RIGHT] == len(found) else 2 if counts[GONE] and not counts[WRONG] else 1


if __name__ == "__main__":
    sys.exit(main())

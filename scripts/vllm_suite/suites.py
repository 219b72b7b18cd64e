"""What is run of others: vLLM's tests of its server, its examples, and the tests of OpenAI's client."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from scripts.served import stop
from scripts.vllm_suite.fetch import rename_address, rename_models

ROOT: Final = Path(__file__).resolve().parents[2]
OUT_OF_TIME: Final = -1
TEST_S: Final = 120
EXAMPLE_S: Final = 600
"""Some answers go on to the end of the context: two minutes on a busy machine."""
SUITE_S: Final = 1500.0
PROGRESS_S: Final = 20.0

VLLM_TESTS: Final = ("openai", "serve/tokenize", "serve/instrumentator", "anthropic")
"""Below tests/entrypoints: the files there that start a server."""

EXAMPLES: Final = (
    "basic/online_serving/openai_completion_client.py",
    "basic/online_serving/openai_completion_client.py --stream",
    "basic/online_serving/openai_chat_completion_client.py",
    "basic/online_serving/openai_chat_completion_client.py --stream",
    "features/structured_outputs/structured_outputs_client.py",
    "features/structured_outputs/structured_outputs_client.py --stream",
    "generate/batched_chat_completions_online.py",
    "reasoning/openai_chat_completion_with_reasoning.py",
    "reasoning/openai_chat_completion_with_reasoning_streaming.py",
    "reasoning/openai_chat_completion_tool_calls_with_reasoning.py",
    "reasoning/openai_responses_client.py",
    "tool_calling/openai_chat_completion_client_with_tools.py",
    "tool_calling/openai_chat_completion_client_with_tools_required.py",
    "tool_calling/openai_responses_client_with_tools.py",
    "scale_out/token_generation_client.py",
)
OPENAI_TESTS: Final = ("test_completions.py", "test_models.py", "test_responses.py", "chat/test_completions.py")


@dataclass(frozen=True, slots=True)
class Server:
    """Where the server is, its model's name, and the folder of its tokenizer."""

    url: str
    model: str
    tokenizer: Path


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one test: `passed`, `failed` or `skipped`, and why."""

    test: str
    outcome: str
    why: str


def vllm_tests(root: Path, tools: Path, server: Server) -> list[Outcome]:
    """vLLM's tests that ask a server."""
    below = root / "tests" / "entrypoints"
    found = sorted(path for part in VLLM_TESTS for path in (below / part).rglob("test_*.py"))
    files = [path for path in found if "RemoteOpenAIServer" in path.read_text(encoding="utf-8")]
    rename_models(files, server.model)
    options = (f"--stand-ins={root}", f"--confcutdir={below}", f"--served-url={server.url}")
    return _pytest(root, tools, server, [*options, *(str(file.relative_to(root)) for file in files)])


def openai_tests(root: Path, tools: Path, server: Server) -> list[Outcome]:
    """The tests of OpenAI's client that ask a server for what this one has."""
    files = [root / "tests" / "api_resources" / name for name in OPENAI_TESTS]
    rename_models(files, server.model)
    options = ("--asyncio-mode=auto", "--override-ini=asyncio_default_fixture_loop_scope=session")
    return _pytest(root, tools, server, [*options, *(str(file.relative_to(root)) for file in files)])


def _pytest(root: Path, tools: Path, server: Server, arguments: Sequence[str]) -> list[Outcome]:
    outcomes = root / "outcomes.jsonl"
    outcomes.unlink(missing_ok=True)
    options = [
        "-q",
        "--tb=native",  # the others parse the source of each frame, which ends pytest where the stack is deep
        "--continue-on-collection-errors",
        "-c",
        os.devnull,
        f"--rootdir={root}",
        f"--timeout={TEST_S}",
        "-p",
        "no:cacheprovider",
    ]
    options += ["-p", "scripts.vllm_suite.plugin", f"--outcomes={outcomes}", f"--served-tokenizer={server.tokenizer}"]
    path = os.pathsep.join([str(ROOT), str(tools)])
    more = {"PYTHONPATH": path, "TEST_API_BASE_URL": f"{server.url}/v1"}
    name, command = root.name.partition("-")[0], [sys.executable, "-m", "pytest", *options, *arguments]
    code = _run(command, root, more, SUITE_S, root / "pytest.log", lambda: f"{name}: {len(_lines(outcomes))} tests")
    found = [
        Outcome(f"{name}/{one['test'].removeprefix('tests/')}", one["outcome"], one["why"])
        for one in map(json.loads, _lines(outcomes))
    ]
    if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return found
    why = f"not over in {SUITE_S:g} s" if code == OUT_OF_TIME else f"pytest's exit code is {code}"
    return [*found, Outcome(f"{name}: its whole suite", "failed", why)]


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def vllm_examples(root: Path, _tools: Path, server: Server) -> list[Outcome]:
    """vLLM's examples of clients, as a user runs them."""
    below, found = root / "examples", []
    files = {below / example.partition(" ")[0] for example in EXAMPLES}
    rename_address(files, server.url)
    rename_models(files, server.model)
    more = {"VLLM_MODEL": server.model, "OPENAI_BASE_URL": f"{server.url}/v1"}
    for example in EXAMPLES:
        name, *arguments = example.split()
        log = root / "example.log"
        code = _run([sys.executable, name, *arguments], below, more, EXAMPLE_S, log)
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        if code == OUT_OF_TIME:
            last = f"not over in {EXAMPLE_S} s: {last}"
        print(f"{example}: {'failed' if code else 'passed'}", file=sys.stderr, flush=True)
        found.append(Outcome(f"vllm/examples/{example}", "failed" if code else "passed", last[-300:] if code else ""))
    return found


def _run(
    command: Sequence[str],
    folder: Path,
    more: dict[str, str],
    limit_s: float,
    log: Path,
    progress: Callable[[], str] | None = None,
) -> int:
    """The exit code, or `OUT_OF_TIME`. Says now and then what the progress is."""
    over_s = time.monotonic() + limit_s
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **more},
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )
        try:
            while (left_s := over_s - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(min(left_s, PROGRESS_S))
                if progress is not None:
                    print(progress(), file=sys.stderr, flush=True)
            return OUT_OF_TIME
        finally:
            stop(process, 5.0)


SUITES: Final = {"tests": vllm_tests, "examples": vllm_examples, "openai": openai_tests}

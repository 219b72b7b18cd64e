"""Compiles the C++ programs of these tests with g++."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[3] / "worker/executors/cpu/native"
PROGRAMS = Path(__file__).parent / "native"
SANITIZERS = {
    "plain": ["-O2"],
    "address": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread"],
}
SANITIZED = [pytest.param(name, marks=() if name == "thread" else pytest.mark.slow) for name in SANITIZERS]
"""Every time: for races, which are what these programs are about. They check the same beside that."""

WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers")


def compiled(target: Path, *sources: str | Path, headers: tuple[Path, ...] = ()) -> Path:
    """An object file or a program; `sources`: files, of these tests where no folder is named, and flags."""
    compiler = shutil.which("g++")
    if not compiler:
        pytest.skip("no g++")
    files = [PROGRAMS / name if str(name).endswith(".cpp") else name for name in sources]
    folders = [f"-I{folder}" for folder in (*headers, PROGRAMS, NATIVE)]
    what = ["-c"] if target.suffix == ".o" else ["-pthread"]
    subprocess.run([compiler, "-std=c++17", "-g", *WARNINGS, *folders, *files, *what, "-o", target], check=True)
    return target


def stress(program: Path, scenario: str, seconds: float, threads: int, seed: int) -> None:
    """Runs a program of these tests, which ends with an error for what is wrong."""
    words = [program, scenario, *map(str, (seconds, threads, seed))]
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    result = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr

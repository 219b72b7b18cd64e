"""Source distributions of other projects: fetched by pip, unpacked, and made to ask for the model that is served.

Nothing of theirs is kept in the repository.
"""

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

VLLM: Final = "0.33.0"
OPENAI: Final = "3.54.0"
TEST_TOOLS: Final = ("pytest-asyncio", "pybase64")
"""What their tests need beside what is installed: without dependencies, so that there is one pytest."""
BUILD_TOOLS: Final = ("setuptools_rust", "setuptools_scm", "hatchling", "hatch-fancy-pypi-readme")
"""What pip asks for a source distribution's metadata."""

FETCH_S: Final = 900.0
_NAMED_MODEL: Final = re.compile(r'^[ \t]*\w*(?:MODEL\w*|model_name|model)(?:: \w+)? = "([^"]+)"', re.MULTILINE)
_SERVED_NAME: Final = re.compile(r'"--served-model-name",\s*"([^"]+)"')
_MODEL_ARGUMENT: Final = re.compile(r'\bmodel="([^"]*[-/][^"]*)"')


class CannotFetchError(Exception):
    """The package index, or the way to it, does not give a source distribution."""


def fetch_tools(folder: Path) -> Path:
    """A folder of what their tests and builds need, to be put on PYTHONPATH. Raises `CannotFetchError`."""
    target = folder / "tools"
    if not (target / "pytest_asyncio").exists():
        _pip("install", "--target", str(target), *BUILD_TOOLS)
        _pip("install", "--target", str(target), "--no-deps", *TEST_TOOLS)
    return target


def fetch(package: str, version: str, folder: Path, tools: Path) -> Path:
    """The unpacked source distribution of a package. Raises `CannotFetchError`."""
    unpacked = folder / f"{package}-{version}"
    if not unpacked.exists():
        archive = folder / f"{package}-{version}.tar.gz"
        if not archive.exists():
            options = ("--no-deps", "--no-binary", package, "--no-build-isolation", "--dest", str(folder))
            build = {"PYTHONPATH": str(tools), "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
            _pip("download", *options, f"{package}=={version}", more=build)
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
    return unpacked


def _pip(*arguments: str, more: Mapping[str, str] = {}) -> None:  # it is only read
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", *arguments[1:]]
    try:
        subprocess.run(command, check=True, env={**os.environ, **more}, timeout=FETCH_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise CannotFetchError(f"pip {arguments[0]} of {arguments[-1]}: {error}") from None


def rename_models(files: Iterable[Path], served: str) -> None:
    """Has the tests of these files ask for the model that is served, whatever theirs is."""
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    forms = (_NAMED_MODEL, _SERVED_NAME, _MODEL_ARGUMENT)
    names = {name for text in texts.values() for form in forms for name in form.findall(text)}
    for file, text in texts.items():
        for name in names:
            text = text.replace(f'"{name}"', f'"{served}"')
        file.write_text(text, encoding="utf-8")


def rename_address(files: Iterable[Path], url: str) -> None:
    """Has examples ask the server that runs."""
    for file in files:
        text = file.read_text(encoding="utf-8")
        file.write_text(re.sub(r"http://(?:localhost|0\.0\.0\.0|127\.0\.0\.1):\d+", url, text), encoding="utf-8")

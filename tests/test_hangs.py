"""A test that hangs ends by itself, with its name and its stacks, and takes none of the others with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INI = """
[pytest]
addopts = --import-mode=importlib -p no:cacheprovider -q -n 1 --dist loadscope
timeout = 60
"""
HANGS = """
import asyncio, ctypes, pytest, uvloop

async def hang():
    asyncio.get_running_loop().call_later(1.0, ctypes.PyDLL(None).sleep, 1000)
    await asyncio.sleep(1000)

def test_before(): pass

@pytest.mark.timeout(2)
def test_that_hangs():
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(hang())

def test_after(): pass
"""


@pytest.mark.slow
def test_a_test_that_hangs_is_named_and_the_others_run(tmp_path):
    """On a loop that swallows what the handlers of signals raise, in a call that holds the interpreter."""
    for name, text in {
        "pytest.ini": INI,
        "conftest.py": "from tests.conftest import *\n",
        "test_hangs.py": HANGS,
        "test_others.py": "def test_one(): pass\n",
    }.items():
        (tmp_path / name).write_text(text)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=100,
    )
    said = ended.stdout
    assert "1 failed, 3 passed" in said, said
    assert "FAILED test_hangs.py::test_that_hangs" in said, said
    assert "in test_that_hangs" in said, said

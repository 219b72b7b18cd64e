"""What a turn of the engine costs in counts, on a fixed load: calls of Python functions, and objects that are made.

A count that grows is seen here, on any machine: see `tests/counting.py`.
"""

import json
import subprocess
import sys

import pytest

from tests.worker.engine.turns import Turns


@pytest.fixture(scope="module")
def few() -> Turns:
    return Turns(1)


@pytest.fixture(scope="module")
def many() -> Turns:
    return Turns(33)


def test_a_turn_takes_few_calls_and_each_plain_decode_beyond_the_first_hardly_any(few, many):
    calls, more = few.calls(), many.calls()
    assert calls <= 100
    assert (more - calls) / 32 <= 3


def test_a_turn_makes_few_objects_for_each_plain_decode():
    """Counted in a process in which nothing else runs."""
    command = [sys.executable, "-m", "tests.worker.engine.turns"]
    blocks, more = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
    assert blocks <= 40
    assert (more - blocks) / 32 <= 4


def test_a_draw_that_looks_back_costs_more_but_not_much():
    calls, more = Turns(1, presence_penalty=0.5).calls(), Turns(33, presence_penalty=0.5).calls()
    assert calls <= 120
    assert (more - calls) / 32 <= 12

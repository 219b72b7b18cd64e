"""A Ray worker node is lost with all that ran on it: the streams go on elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parent.parent.parent


def test_the_streams_of_a_lost_node_go_on_on_another():
    program = subprocess.run(
        [sys.executable, "-m", "tests.chaos.node_loss"], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    lines = [line for line in program.stdout.splitlines() if line.startswith("{")]
    assert lines, program.stderr[-3000:]
    assert json.loads(lines[-1]) == {"num_busy_before": 2, "num_replicas_after": 1, "num_equal": 8}

"""A Ray node goes with the replica on it, and no stream notices. What happens is in `ray_nodes.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.chaos.tally import Row, Tally

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

LIMIT_S = 360
FOUND_S = 0.5
"""A silent replica is found after a second or so: a stream on it pauses for more than this."""


def run_program(module: str, results: Path, *arguments: str, limit_s: float = LIMIT_S) -> None:
    """To its end. Whatever it has started ends with it, however that comes."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_AUTH_MODE": "disabled"}
    with subprocess.Popen([sys.executable, "-m", module, str(results), *arguments], env=environment) as program:
        try:
            program.wait(limit_s)
        except BaseException:
            for process in [*psutil.Process(program.pid).children(recursive=True), program]:
                process.kill()
            raise
    assert program.returncode == 0


def test_no_stream_notices_the_loss_of_a_node(tmp_path: Path, tally: Tally):
    """With notice, without, and without anyone being told. The replica comes back on a node that is added."""
    results = tmp_path / "rows.json"
    run_program("tests.chaos.ray_nodes", results)
    rows = {fault: Row(**fields) for fault, fields in json.loads(results.read_text()).items()}
    assert len(rows) == 3
    for fault, row in rows.items():
        tally.add(fault, row)
        assert row.num_streams > 0
        assert row.is_clean, row.differences
    silent = rows["a Ray node falls silent"]
    assert max(silent.pauses_s) > FOUND_S, "no stream ran on the node when it fell silent"

"""Which process the kernel ends first when memory runs out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.worker.replica.processes import OomScore, ProcessId, lower_oom_score

ME = ProcessId(os.getpid(), 0)
PROGRAM = """
import os
from pathlib import Path
from holdfast.worker.replica.processes import OomScore, lower_oom_score
from holdfast.worker.replica.processes import ProcessId
own = Path("/proc/self/oom_score_adj")
own.write_text("1000")
lower_oom_score(OomScore.ROUTER, [ProcessId.of(os.getpid())])
print(own.read_text())
"""


def score_of(folder: Path, before: str) -> str:
    file = folder / str(ME.pid) / "oom_score_adj"
    file.parent.mkdir(exist_ok=True)
    file.write_text(before)
    lower_oom_score(OomScore.SERVING_REPLICA, [ME], folder)
    return file.read_text()


def test_a_score_is_lowered_and_never_raised(tmp_path):
    assert score_of(tmp_path, "1000\n") == "700"
    assert score_of(tmp_path, "-500\n") == "-500\n"


def test_a_process_that_has_ended_costs_nothing(tmp_path):
    lower_oom_score(OomScore.ROUTER, [ME], tmp_path / "nowhere")


def test_replicas_go_before_routers():
    assert OomScore.SERVING_REPLICA > OomScore.ROUTER


@pytest.mark.skipif(
    int(Path("/proc/self/oom_score_adj").read_text()) > 0, reason="this process may not lower its score"
)
def test_the_kernel_takes_what_a_worker_of_ray_writes():
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "300", done.stderr

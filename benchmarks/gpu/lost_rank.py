"""A rank of two is killed while requests run: how long until every caller is answered, and until a new replica serves.

    python -m benchmarks.gpu.lost_rank [--model 0.6b]

Over NCCL on two GPUs, and over gloo on a CPU. No network; a few minutes, most of them loading.
"""

import os
import signal
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.callers import Callers
from benchmarks.gpu.findings import Findings, Row, machine, parser_of, tell
from benchmarks.gpu.load import Wish
from benchmarks.gpu.models import MAX_POSITIONS
from benchmarks.gpu.serving import settings
from holdfast.worker.config import WorkerConfig
from holdfast.worker.executors.rendezvous import Rendezvous
from holdfast.worker.replica.rank import LocalLauncher, LocalRanks
from holdfast.worker.replica.replica import Replica

_NUM_CALLERS = 8


class _Launcher(LocalLauncher):
    """Keeps hold of what it has launched."""

    def launch(self, config: WorkerConfig, rendezvous: Rendezvous) -> LocalRanks:
        self.ranks = super().launch(config, rendezvous)
        return self.ranks


def main() -> None:
    options = parser_of(__doc__, model="0.6b").parse_args()
    tell(measure(options.model, options.device), options.json)


def measure(model: str, device: str) -> Findings:
    """Raises RuntimeError with fewer than two GPUs."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        raise RuntimeError(f"a rank of two is killed: that needs two GPUs, and here are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        config = settings(model, device, Path(folder), num_ranks=2)
        row = _strike(config)
        started_s = time.perf_counter()
        again = Replica.start(config)
        row["new replica, s"] = time.perf_counter() - started_s
        row["its 8 tokens, ms"] = Callers(again).run([Wish((3, 4, 5), 8)]) * 1e3
        again.stop()
    title = f"A rank killed under {'NCCL' if device == 'cuda' else 'gloo'}, {model}"
    return Findings(title=title, machine=machine(torch.device(device)), rows=(row,))


def _strike(config: WorkerConfig) -> Row:
    launcher = _Launcher()
    replica = Replica.start(config, launcher)
    callers = Callers(replica)
    callers.submit([Wish((3, 4, 5 + number), MAX_POSITIONS - 8) for number in range(_NUM_CALLERS)])
    callers.wait(lambda: callers.num_tokens > 4 * _NUM_CALLERS)
    killed_s = time.perf_counter()
    os.kill(launcher.ranks.pids[0], signal.SIGKILL)
    callers.wait(lambda: callers.failure is not None)
    answered_s = time.perf_counter()
    replica.stop()
    return {
        "callers": _NUM_CALLERS,
        "answered after, ms": (answered_s - killed_s) * 1e3,
        "stopped after, ms": (time.perf_counter() - killed_s) * 1e3,
    }


if __name__ == "__main__":
    main()

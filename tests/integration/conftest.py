import signal
import sys
from collections.abc import Iterator

import psutil
import pytest

from cluster.config import ClusterConfig, HoldfastConfig
from cluster.progress import progress
from cluster.serving import Serving, serving
from worker.config import ParallelConfig


@pytest.fixture(scope="module")
def cluster() -> Iterator[Serving]:
    """Two replicas of two ranks each behind one router, on a Ray of their own. Ends without a process left behind."""
    config = HoldfastConfig(cluster=ClusterConfig(replicas=2, port=0), parallel=ParallelConfig(tensor_parallel_size=2))
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with progress(sys.stderr) as report, serving(config, report) as serving_cluster:
        yield serving_cluster
        processes = ray_processes()
    signal.signal(signal.SIGTERM, on_sigterm)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []


def ray_processes() -> list[psutil.Process]:
    """Everything of Ray that this process has started, directly or not."""
    return [process for process in psutil.Process().children(recursive=True) if "ray" in " ".join(process.cmdline())]


def processes_named(part: str) -> list[psutil.Process]:
    """Those of Ray whose title has `part` in it, such as `RankActor` or `:Directory`."""
    return [process for process in ray_processes() if part in " ".join(process.cmdline())]

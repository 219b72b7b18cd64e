import signal
import sys
from collections.abc import Iterator

import psutil
import pytest

from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.progress_bars import progress
from holdfast.cluster.serve.serving import Serving, serving
from holdfast.worker.config import ParallelConfig
from tests.integration.processes import ray_processes, two_free_ports


@pytest.fixture(scope="module")
def cluster() -> Iterator[Serving]:
    """Two replicas of two ranks each behind two routers, on a Ray of their own. Ends without a process left behind."""
    config = HoldfastConfig(
        cluster=ClusterConfig(replicas=2, port=two_free_ports(), engine_port=0),
        parallel=ParallelConfig(tensor_parallel_size=2),
    )
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with progress(sys.stderr) as report, serving(config, report) as serving_cluster:
        yield serving_cluster
        processes = ray_processes()
    signal.signal(signal.SIGTERM, on_sigterm)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []

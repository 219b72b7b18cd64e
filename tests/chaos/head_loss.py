"""A Ray cluster whose GCS keeps its tables in Redis loses that GCS under a steady load, and gets it back.

    python -m tests.chaos.head_loss FILE     # writes one JSON object: a `Row`, and seconds

A program of its own, because a process has one connection to Ray.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import psutil

SERVERS: Final = ("redis-server", "valkey-server")
NUM_CLIENTS: Final = 4
AWAY_S: Final = 20.0
"""How long the GCS is away: longer than any lease of the directory, and several times Serve's health checks."""

RECONNECT_S: Final = 600
"""What Ray's other processes wait for a GCS before they end (60 s by default)."""


def external_store() -> str | None:
    """The program of a Redis or Valkey server on this machine."""
    return next((found for name in SERVERS if (found := shutil.which(name))), None)


@contextmanager
def redis() -> Iterator[str]:
    """Its address."""
    program = external_store()
    assert program is not None, "test_head_loss.py has looked"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                yield f"127.0.0.1:{port}"
            finally:
                server.kill()


def main(results: Path) -> None:
    with redis() as address:
        os.environ["RAY_REDIS_ADDRESS"] = address
        # Ray runs Python between fork and exec when it starts a GCS, while the load's threads are inside of gRPC.
        os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
        os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(RECONNECT_S)  # noqa: SIM112  # as Ray spells it
        results.write_text(json.dumps(_lose_the_gcs()))


def _lose_the_gcs() -> dict[str, Any]:
    from ray.cluster_utils import Cluster

    from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
    from holdfast.cluster.progress_bars import progress
    from holdfast.cluster.serve.serving import serving
    from tests.chaos.ray_nodes import loaded

    cluster = ClusterConfig(host="127.0.0.1", port=0, replicas=2, cpus_per_rank=1, drain_timeout_s=20.0)
    head = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 80 * 2**20}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    config = HoldfastConfig(cluster=cluster.model_copy(update={"address": nodes.address}))
    with (
        progress(sys.stderr) as report,
        serving(config, report) as running,
        loaded(nodes, running.routers) as site,
    ):
        found = _through_the_loss(site, nodes.head_node)
    started = psutil.Process().children(recursive=True)
    nodes.shutdown()
    for process in psutil.wait_procs(started, 15)[1]:
        process.kill()
    return found


def _through_the_loss(site: Any, head: Any) -> dict[str, Any]:
    """Streams run when the GCS goes, new ones begin while it is away, and a replica dies then, too."""
    from tests.chaos.tally import Row

    site.do(site.load.judge_all(Row()))
    row = Row(num_faults=1)
    site.do(site.load.under_way(NUM_CLIENTS - 1))
    struck_s = time.monotonic()
    head.kill_gcs_server()
    row.pauses_s += site.do(site.load.settle(struck_s))
    while time.monotonic() < struck_s + AWAY_S:
        site.do(site.load.under_way(NUM_CLIENTS - 1))  # of those that have begun since
        site.do(site.load.judge_all(row))
    killed_s = time.monotonic()
    _a_leader().kill()
    row.pauses_s += site.do(site.load.settle(killed_s))
    site.until(lambda load: len(load.replicas) == 1)
    restarted_s = time.monotonic()
    head.start_gcs_server()
    site.until(lambda load: len(load.replicas) == 2)
    back_s = time.monotonic() - restarted_s
    site.do(site.load.judge_all(row))
    return {"row": asdict(row), "away_s": restarted_s - struck_s, "replaced_after_s": back_s}


def _a_leader() -> psutil.Process:
    below = psutil.Process().children(recursive=True)
    return next(one for one in below if ":Replica" in " ".join(one.cmdline()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

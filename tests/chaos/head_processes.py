"""Processes of Ray that drive a cluster die one by one under a steady load: Serve's controller, agents and the raylet
of a node, the head's raylet.

    python -m tests.chaos.head_processes FILE           # writes one JSON object: for each loss a `Row`, and seconds
    python -m tests.chaos.head_processes FILE --redis   # the same where the GCS keeps its tables in Redis

A program of its own, which is not connected to Ray: a driver ends with its node's raylet.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from tests.chaos.head_loss import RECONNECT_S, redis
from tests.integration.processes import command_of

NUM_CLIENTS: Final = 4
STORE: Final = 80 * 2**20
PLACE: Final = "holdfast_rank"
HEAD: Final = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE}
"""Nothing of Holdfast's runs there, as is recommended: Serve's controller alone."""
FRONT_NODE: Final = {"num_cpus": 3, "resources": {"front_door": 2}, "object_store_memory": STORE}
NODE: Final = {"num_cpus": 2, "resources": {PLACE: 1}, "object_store_memory": STORE}
AWAY_S: Final = 20.0
"""How long the head's raylet is away: longer than any lease of the directory."""

CONTROLLER: Final = ("ray::ServeController",)
DASHBOARD_AGENT: Final = ("ray::DashboardAgent",)
RAYLET: Final = ("raylet/raylet", "--node_manager_port")
RUNTIME_ENV_AGENT: Final = ("ray::RuntimeEnvAgent",)
"""Words of a process's command line."""

ENDS_S: Final = 60.0
EXIT_HANDED_OVER: Final = 0


@dataclass
class Loss:
    """What became of the streams, and of the cluster."""

    name: str
    row: Any
    replaced_after_s: float
    """From when it could be, until as many replicas served as before."""
    lasted_s: float = 0.0
    """Until what was struck had ended, or was given back."""


def deploy(address: str) -> None:
    """In a process of its own, which leaves the cluster behind. Prints the routers' addresses."""
    from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
    from holdfast.cluster.serve.serving import serving
    from holdfast.worker.config import ParallelConfig

    cluster = ClusterConfig(
        address=address,
        host="127.0.0.1",
        port=0,
        replicas=2,
        cpus_per_rank=1,
        rank_resources={PLACE: 1.0},
        router_resources={"front_door": 1.0},
        drain_timeout_s=20.0,
    )
    config = HoldfastConfig(cluster=cluster, parallel=ParallelConfig(num_threads=1))
    with serving(config, lambda phase, done, total: None) as running:
        print(json.dumps(running.routers), flush=True)
        os._exit(EXIT_HANDED_OVER)  # what `serving` would take down runs on


def deployed(address: str) -> tuple[str, ...]:
    command = [sys.executable, "-m", __spec__.name, "--deploy", address]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return tuple(json.loads(said.splitlines()[-1]))


class Losses:
    """One after the other, on one cluster, which is whole again before the next."""

    def __init__(self, nodes: Any, site: Any, *, has_redis: bool) -> None:
        self._nodes, self._site, self._has_redis = nodes, site, has_redis

    def all(self) -> Iterator[Loss]:
        yield self._lose_the_controller()
        yield self._lose_a_node("the dashboard agent of a node", DASHBOARD_AGENT)
        yield self._lose_a_node("the runtime-env agent of a node", RUNTIME_ENV_AGENT)
        yield self._lose_a_node("the raylet of a node", RAYLET)
        yield self._lose_the_raylet()

    def _lose_the_controller(self) -> Loss:
        """And then a replica, which nobody replaces until Ray has started the controller again."""
        row = self._strike(lambda: self._one(CONTROLLER).kill())
        return Loss("Serve's controller", row, self._replaces())

    def _lose_a_node(self, name: str, words: tuple[str, ...]) -> Loss:
        """All of it ends with one of its processes, by itself, and so the replica there. Another node comes."""
        node = next(one for one in self._nodes.worker_nodes if self._leaders(one))
        lost, leaders = self._processes(node), self._leaders(node)
        struck_s = time.monotonic()

        def strike() -> None:
            self._one(words, lost).kill()
            node.all_processes["raylet"][0].process.wait(ENDS_S)  # or Ray takes it for alive: a zombie has its pid
            alive = psutil.wait_procs(leaders, ENDS_S)[1]
            assert alive == [], f"the replica has not ended with its node: {alive}"

        row = self._strike(strike)
        ended_s = time.monotonic() - struck_s
        assert psutil.wait_procs(lost, ENDS_S)[1] == [], "they live on where their node does not"
        self._nodes.remove_node(node, allow_graceful=False)
        began_s = time.monotonic()
        self._nodes.add_node(**NODE)
        self._until_whole()
        return Loss(name, row, time.monotonic() - began_s, ended_s)

    def _lose_the_raylet(self) -> Loss:
        """Of the head, and Serve's controller with it. While it is away, new requests are served. With Redis a
        replica dies then, too, and the head comes back as a whole, as a supervisor starts it again.
        """
        head, struck_s = self._nodes.head_node, time.monotonic()
        address = head.gcs_address
        row = self._strike(head.kill_raylet)
        while time.monotonic() < struck_s + AWAY_S:
            self._site.do(self._site.load.under_way(NUM_CLIENTS - 1))  # of those that have begun since
            self._site.do(self._site.load.judge_all(row))
        if not self._has_redis:
            return Loss("the head's raylet", row, 0.0, AWAY_S)
        self._kill_a_replica(row)
        self._site.until(lambda load: len(load.replicas) == 1)
        head.kill_all_processes(check_alive=False, allow_graceful=False)
        self._nodes.head_node = None
        began_s = time.monotonic()
        self._nodes.add_node(**HEAD, gcs_server_port=int(address.rpartition(":")[2]))
        self._until_whole()
        self._site.do(self._site.load.judge_all(row))
        return Loss("the head's raylet", row, time.monotonic() - began_s, began_s - struck_s)

    def _strike(self, strike: Callable[[], object]) -> Any:
        """What became of the streams that ran then, and of those that began since."""
        from tests.chaos.tally import Row

        self._site.do(self._site.load.judge_all(Row()))
        row = Row(num_faults=1)
        self._site.do(self._site.load.under_way(NUM_CLIENTS - 1))
        struck_s = time.monotonic()
        strike()
        row.pauses_s += self._site.do(self._site.load.settle(struck_s))
        self._site.do(self._site.load.under_way(NUM_CLIENTS - 1))  # of those that have begun since
        self._site.do(self._site.load.judge_all(row))
        return row

    def _replaces(self) -> float:
        """Seconds from the loss of a replica until another serves in its place."""
        from tests.chaos.tally import Row

        began_s = time.monotonic()
        self._kill_a_replica(Row())
        self._site.until(lambda load: len(load.replicas) == 1)
        self._until_whole()
        return time.monotonic() - began_s

    def _kill_a_replica(self, row: Any) -> None:
        struck_s = time.monotonic()
        next(leader for node in self._nodes.worker_nodes for leader in self._leaders(node)).kill()
        row.pauses_s += self._site.do(self._site.load.settle(struck_s))

    def _until_whole(self) -> None:
        self._site.until(lambda load: len(load.replicas) == 2)

    def _leaders(self, node: Any) -> list[psutil.Process]:
        return [one for one in self._processes(node) if ":Replica" in command_of(one)]

    @staticmethod
    def _processes(node: Any) -> list[psutil.Process]:
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        return [raylet, *raylet.children(recursive=True)]

    def _one(self, words: tuple[str, ...], processes: list[psutil.Process] | None = None) -> psutil.Process:
        candidates = self._processes(self._nodes.head_node) if processes is None else processes
        commands = {one: command_of(one) for one in candidates}
        found = [one for one, command in commands.items() if all(word in command for word in words)]
        assert found, f"no process of {words}: {sorted(commands.values())}"
        return found[0]


def run(*, has_redis: bool) -> dict[str, Any]:
    from ray.cluster_utils import Cluster

    from tests.chaos.ray_nodes import loaded

    nodes = Cluster(initialize_head=True, head_node_args=HEAD)
    nodes.add_node(**FRONT_NODE)
    for _ in range(2):
        nodes.add_node(**NODE)
    found = {}
    with loaded(nodes, deployed(nodes.address)) as site:
        for loss in Losses(nodes, site, has_redis=has_redis).all():
            print(f"{time.strftime('%H:%M:%S')} {loss.name}", file=sys.stderr, flush=True)
            found[loss.name] = asdict(loss)
    started = psutil.Process().children(recursive=True)
    for process in started:
        process.kill()
    assert psutil.wait_procs(started, 15)[1] == []
    return found


def main(results: Path, *, has_redis: bool) -> None:
    # Ray runs Python between fork and exec when it starts a GCS, while the load's threads are inside of gRPC.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    with ExitStack() as stack:
        if has_redis:
            os.environ["RAY_REDIS_ADDRESS"] = stack.enter_context(redis())
            os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(RECONNECT_S)  # noqa: SIM112  # as Ray spells it
        found = run(has_redis=has_redis)
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "--deploy":
        deploy(sys.argv[2])
    else:
        main(Path(sys.argv[1]), has_redis="--redis" in sys.argv)

"""A Ray cluster of several nodes on this machine, which loses one node after the other while a steady load runs.

    python -m tests.chaos.ray_nodes FILE     # writes one JSON object: a `Row` for each sort of loss

A program of its own, because a process has one connection to Ray. Custom resources see to it that every node but one
has a replica.
"""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from ray.cluster_utils import Cluster

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.progress_bars import progress
from holdfast.cluster.serve.serving import serving
from holdfast.v1.inference_pb2 import GetLoadResponse
from holdfast.worker.config import ParallelConfig
from holdfast.worker.errors import ReplicaError
from tests.chaos.kinds import KINDS
from tests.chaos.load import Load, steady_load
from tests.chaos.tally import Row

NUM_CLIENTS: Final = 8
NUM_REPLICAS: Final = 2
RANKS: Final = 2
MAX_TOKENS: Final = 80
BACK_S: Final = 90.0
GONE_S: Final = 15.0
NOTICE_S: Final = 120.0
DRAIN_S: Final = 60.0
"""Far more than `GONE_S`: a replica that is asked to go must not use it up."""

POLL_S: Final = 0.02

PLACE: Final = "holdfast_rank"
"""The resource of which each node has as much as one replica takes. Routers stay on the first node by another one."""

NODE: Final = {"num_cpus": 1, "resources": {PLACE: RANKS}, "object_store_memory": 80 * 2**20}
HEAD: Final = {**NODE, "num_cpus": 3, "resources": {PLACE: RANKS, "front_door": 2}, "include_dashboard": False}

Do = Callable[[Coroutine[Any, Any, Any]], Any]


def config(address: str) -> HoldfastConfig:
    return HoldfastConfig(
        cluster=ClusterConfig(
            address=address,
            host="127.0.0.1",
            port=0,
            replicas=NUM_REPLICAS,
            cpus_per_rank=1 / RANKS,
            rank_resources={PLACE: 1.0},
            router_resources={"front_door": 1.0},
            drain_timeout_s=DRAIN_S,
        ),
        parallel=ParallelConfig(tensor_parallel_size=RANKS, num_threads=1),
    )


@dataclass(frozen=True)
class Site:
    """The nodes, the routers and the load, which runs on a thread of its own: Ray wants the main one to start nodes."""

    nodes: Cluster
    routers: tuple[str, ...]
    load: Load
    do: Do

    def lose(self, node: Any, strike: Callable[[Any], object], *, ends: bool = True) -> Row:
        """What became of the streams when a node went on which a replica served some of them. `ends`: its processes."""
        self.do(self.load.judge_all(Row()))
        self.until(is_whole)
        row = Row(num_faults=1)
        leader_and_ranks = replica_processes(node)
        struck = self.do(self.load.under_way(NUM_CLIENTS - 1))
        struck_s = time.monotonic()
        strike(node)
        row.pauses_s += self.do(self.load.settle(struck_s, struck))
        assert not ends or psutil.wait_procs(leader_and_ranks, GONE_S)[1] == [], (
            "they live on where their node does not"
        )
        self.do(self.load.judge_all(row))
        return row

    def until(self, condition: Callable[[GetLoadResponse], bool]) -> GetLoadResponse:
        """Of what every router says; what the last one said."""
        load: GetLoadResponse = self.do(asyncio.wait_for(_until(condition, self.routers), BACK_S))
        return load

    def give_notice(self, node: Any) -> None:
        """As a cloud or an operator does before it takes a node away. Returns once its replica has a successor."""
        before = {replica.replica_id for replica in self.until(is_whole).replicas}
        wishes = {
            "--address": self.nodes.address,
            "--node-id": node.node_id,
            "--reason": "DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message": "the machine goes away",
            "--deadline-remaining-seconds": str(round(NOTICE_S)),
        }
        words = [word for wish in wishes.items() for word in wish]
        subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *words], check=True, stdout=sys.stderr
        )
        self.until(lambda load: any(replica.replica_id not in before for replica in load.replicas))

    def remove(self, node: Any) -> None:
        """SIGKILL to its raylet; whatever else runs there has to find that out."""
        self.nodes.remove_node(node, allow_graceful=False)


def silence(node: Any) -> None:
    """Nothing on a node says anything any more, and nobody is told: as if its network were gone."""
    for process in node_processes(node):
        process.send_signal(signal.SIGSTOP)


def node_processes(node: Any) -> list[psutil.Process]:
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [raylet, *raylet.children(recursive=True)]


def replica_processes(node: Any) -> list[psutil.Process]:
    """The leader and the other ranks of the replica that a node has."""
    titles = {process: " ".join(process.cmdline()) for process in node_processes(node)}
    found = [process for process, title in titles.items() if ":Replica" in title or "RankActor" in title]
    assert len(found) == RANKS, f"no replica there: {sorted(titles.values())}"
    return found


def is_whole(load: GetLoadResponse) -> bool:
    """All replicas are there, and streams run on each."""
    return len(load.replicas) == NUM_REPLICAS and all(replica.num_running for replica in load.replicas)


async def _until(condition: Callable[[GetLoadResponse], bool], routers: tuple[str, ...]) -> GetLoadResponse:
    for router in routers:
        async with AsyncClient(router) as client:
            while (load := await _load_of(client)) is None or not condition(load):
                await asyncio.sleep(POLL_S)
    return load


async def _load_of(client: AsyncClient) -> GetLoadResponse | None:
    """None where its router does not answer in time, as on a machine that starts processes."""
    try:
        return await client.get_load()
    except ReplicaError:
        return None


@contextmanager
def other_thread() -> Iterator[Do]:
    """Runs coroutines to their end, one at a time, on a loop on which others go on."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def loaded(nodes: Cluster, routers: tuple[str, ...], connect_s: float = 5.0) -> Iterator[Site]:
    kinds = [kind.longer(MAX_TOKENS) for kind in KINDS if kind.may_meet_itself]
    with other_thread() as do:
        loading = steady_load(routers, kinds, NUM_CLIENTS, connect_s)
        load = do(loading.__aenter__())
        try:
            yield Site(nodes, routers, load, do)
        finally:
            do(loading.__aexit__(None, None, None))


def lose_three(site: Site, first: Any) -> Iterator[tuple[str, Row]]:
    """Each replica is started again on the node that is added next."""
    second = site.nodes.add_node(**NODE)
    yield "a Ray node goes, with notice", site.lose(first, site.give_notice)
    site.remove(first)
    yield "loss of a Ray node", site.lose(second, site.remove)
    third = site.nodes.add_node(**NODE)
    yield "a Ray node falls silent", site.lose(third, silence, ends=False)
    for process in node_processes(third):
        process.kill()
    site.remove(third)


def main(results: Path) -> None:
    nodes = Cluster(initialize_head=True, head_node_args=HEAD)
    first = nodes.add_node(**NODE)
    with (
        progress(sys.stderr) as report,
        serving(config(nodes.address), report) as cluster,
        loaded(nodes, cluster.routers) as site,
    ):
        rows = dict(lose_three(site, first))
    started = psutil.Process().children(recursive=True)
    nodes.shutdown()
    assert psutil.wait_procs(started, GONE_S)[1] == [], "they outlive the cluster"
    results.write_text(json.dumps({name: asdict(row) for name, row in rows.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

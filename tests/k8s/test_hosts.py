"""A replica of two ranks on two hosts with addresses of their own, one of which is cut off in mid-stream.

The hosts are network namespaces on this machine, so nothing but the network joins them. Needs Linux, root and
iproute2, and says so where they are missing.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from tests.chaos.kinds import KINDS
from tests.chaos.load import steady_load
from tests.chaos.tally import Row
from tests.k8s.hosts import Host, Hosts, hosts, needs_hosts
from tests.k8s.local_cluster import DASHBOARD, TOKEN, ask_serve, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_CLIENTS = 4
MAX_TOKENS = 60
RANKS = 2
LONGEST_PAUSE_S = 30.0
"""Far less than Ray takes to find that a host is gone, and far more than we do on a busy machine."""

ENVIRONMENT = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
HEAD = "--head --num-cpus=2 --labels=pool=routers --dashboard-host=0.0.0.0"
RANK_HOST = "--num-cpus=1 --labels=pool=ranks"
COMMON = "--object-store-memory=80000000 --block"
CONFIG = {
    "proxy_location": "Disabled",
    "applications": [
        {
            "name": "holdfast",
            "import_path": "holdfast:build_app",
            "route_prefix": None,
            "args": {
                "model": {"model": "demo", "device": "cpu"},
                "parallel": {"tensor_parallel_size": RANKS, "num_threads": 1},
                "cache": {"kv_cache_memory": "64MiB"},
                "security": {"insecure": True},
                "cluster": {
                    "replicas": 2,
                    "span_nodes": True,
                    "rank_labels": {"pool": "ranks"},
                    "router_labels": {"pool": "routers"},
                },
            },
        }
    ],
}


@dataclass
class Site:
    head: Host
    rank_hosts: list[Host]

    @property
    def routers(self) -> tuple[str, ...]:
        return tuple(f"{self.head.address}:{port}" for port in (50051, 50052))

    def processes(self, part: str) -> dict[str, list[psutil.Process]]:
        """Those with it in their titles, by host."""
        return {
            host.name: [one for one in host.processes if part in " ".join(one.cmdline())] for host in self.rank_hosts
        }

    def host_of(self, part: str, *, other_than: Host | None = None) -> Host:
        return next(host for host in self.rank_hosts if self.processes(part)[host.name] and host is not other_than)


def start(machine: Hosts, name: str, flags: str) -> Host:
    return machine.start(name, f"ray start {flags} {COMMON}", ENVIRONMENT)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    needs_hosts()
    with hosts(tmp_path_factory.mktemp("logs")) as machine:
        head = start(machine, "head", HEAD)
        address = f"--address={head.address}:6379"
        until(
            lambda: head.run(["ray", "health-check", address], 60).returncode == 0, lambda: "the head does not come up"
        )
        rank_hosts = [start(machine, f"ranks-{number}", f"{address} {RANK_HOST}") for number in range(2 * RANKS)]
        made = Site(head, rank_hosts)
        until(lambda: is_up(head), lambda: f"nothing at {head.address}:{DASHBOARD}")
        ask_serve(head, "PUT", CONFIG)
        until(lambda: is_serving(head), lambda: json.dumps(ask_serve(head, "GET")))
        yield made


def is_up(head: Host) -> bool:
    try:
        return ask_serve(head, "GET") is not None
    except OSError:
        return False


def is_serving(head: Host) -> bool:
    return [one["status"] for one in ask_serve(head, "GET")["applications"].values()] == ["RUNNING"]


async def lose(site: Site, host: Host) -> Row:
    kinds = [kind.longer(MAX_TOKENS) for kind in KINDS if kind.may_meet_itself]
    row = Row(num_faults=1)
    async with steady_load(site.routers, kinds, NUM_CLIENTS) as load:
        struck = await load.under_way(NUM_CLIENTS - 1)
        struck_s = time.monotonic()
        host.cut()
        row.pauses_s += await load.settle(struck_s, struck)
        await load.judge_all(row)
    return row


def test_ranks_of_a_replica_lie_on_hosts_of_their_own(site):
    leaders, others = site.processes("holdfast:Replica"), site.processes("RankActor")
    assert sorted(len(found) for found in leaders.values()) == [0, 0, 1, 1]
    assert all(len(others[name]) == 1 - len(found) for name, found in leaders.items())


def test_a_host_is_cut_off_in_mid_stream_and_no_stream_differs(site):
    """That of a rank, which its leader waits for in every layer. Nobody is told: packets go nowhere."""
    row = asyncio.run(lose(site, site.host_of("RankActor")))
    assert row.is_clean, row.differences
    assert row.num_streams >= NUM_CLIENTS - 1
    assert row.pauses_s, "no stream ran there"
    assert max(row.pauses_s) < LONGEST_PAUSE_S
    print(f"{row.num_streams} streams, longest pause {max(row.pauses_s):.2f} s")

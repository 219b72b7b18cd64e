"""The overlay cpu-demo from its own manifests: pods are hosts on this machine, started as KubeRay would start them.

Needs Linux, root and iproute2, and says so where they are missing. How it is done is in `local_cluster.py`.
"""

import asyncio
import time
from collections.abc import Callable, Iterator

import openai
import psutil
import pytest

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.worker.sampling_params import SamplingParams
from tests.chaos.kinds import KINDS
from tests.chaos.load import steady_load
from tests.chaos.tally import Row
from tests.k8s.hosts import needs_hosts
from tests.k8s.local_cluster import LocalCluster, Running, local_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_CLIENTS = 4
MAX_TOKENS = 60
PROMPT, ANSWER = "The capital of France is", " Paris."


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    needs_hosts()
    before = set(psutil.Process().children(recursive=True))
    with local_cluster("overlays/cpu-demo", tmp_path_factory.mktemp("logs")) as started:
        yield started
    assert set(psutil.Process().children(recursive=True)) <= before


def addresses(cluster: LocalCluster) -> tuple[str, ...]:
    return tuple(f"{router.host.address}:{router.pod.ports['grpc']}" for router in cluster.group("routers"))


def under_streams(cluster: LocalCluster, strike: Callable[[], object]) -> Row:
    """What became of the streams that ran when something happened, and of those while it lasted."""
    return asyncio.run(_under_streams(cluster, strike))


async def _under_streams(cluster: LocalCluster, strike: Callable[[], object]) -> Row:
    longest_s = cluster.settings["limits"]["max_timeout_s"]
    wanted = [kind for kind in KINDS if kind.may_meet_itself and kind.options.get("timeout_s", 0) <= longest_s]
    kinds = [kind.longer(MAX_TOKENS) for kind in wanted]
    row = Row(num_faults=1)
    async with steady_load(addresses(cluster), kinds, NUM_CLIENTS) as load:
        struck = await load.under_way(NUM_CLIENTS - 1)
        struck_s = time.monotonic()
        settling = asyncio.create_task(load.settle(struck_s, struck))
        await asyncio.to_thread(strike)
        row.pauses_s += await settling
        await load.judge_all(row)
    return row


def check(row: Row) -> None:
    assert row.num_streams >= NUM_CLIENTS - 1
    assert row.is_clean, row.differences
    print(f"{row.num_streams} streams, longest pause {max(row.pauses_s, default=0.0):.2f} s")


def replaced(cluster: LocalCluster, lost: Running) -> Running:
    new = cluster.replace(lost)
    cluster.until_ready()
    return new


def test_every_probe_succeeds_and_serve_runs_what_the_config_says(cluster):
    assert cluster.not_ready() == {}
    assert [why for one in cluster.running if (why := one.probe("livenessProbe"))] == []
    (application,) = cluster.applications().values()
    assert application["status"] == "RUNNING"


def test_pods_run_what_their_pool_is_for(cluster):
    titles = {one.host.name: [" ".join(p.cmdline()) for p in one.host.processes] for one in cluster.running}
    homes = {
        part: {name.rpartition("-")[0] for name, found in titles.items() if any(part in title for title in found)}
        for part in ("holdfast:Router", "holdfast:Replica", "RankActor")
    }
    assert homes == {"holdfast:Router": {"routers"}, "holdfast:Replica": {"replicas"}, "RankActor": {"replicas"}}


def test_nothing_runs_as_root_or_has_rights(cluster):
    for one in cluster.running:
        first = psutil.Process(one.host.pid)
        assert all(process.uids().effective == 1000 for process in [first, *first.children(recursive=True)])


def test_a_grpc_client_and_an_http_client_get_the_answer_as_a_stream(cluster):
    async def by_grpc() -> str:
        async with AsyncClient(addresses(cluster)) as client:
            params = SamplingParams(temperature=0.0, max_tokens=8)
            return "".join([chunk.text async for chunk in client.stream(PROMPT, params)])

    assert asyncio.run(by_grpc()) == ANSWER
    for router in cluster.group("routers"):
        url = f"http://{router.host.address}:{router.pod.ports['http']}/v1"
        with openai.OpenAI(base_url=url, api_key="none") as client:
            chunks = client.completions.create(model="demo", prompt=PROMPT, temperature=0, max_tokens=8, stream=True)
            assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == ANSWER


@pytest.mark.parametrize("group", ["replicas", "routers"])
def test_a_pod_is_killed_under_streams_and_nothing_changes(cluster, group):
    pod = cluster.group(group)[0]
    check(under_streams(cluster, pod.host.kill))
    replaced(cluster, pod)


@pytest.mark.parametrize("group", ["replicas", "routers"])
def test_a_pod_is_evicted_under_streams_and_nothing_changes(cluster, group):
    """The hook drains it; kubelet's signals find nothing that serves."""
    pod = cluster.group(group)[0]
    check(under_streams(cluster, pod.end))
    replaced(cluster, pod)


def test_a_change_of_the_serve_config_is_made_in_place_under_streams(cluster):
    """As `kubectl apply` of another serveConfigV2: replicas are replaced one after the other, and streams move."""
    config = cluster.deployed
    config["applications"][0]["args"]["scheduler"] = {"max_num_seqs": 32}
    before = _replica_processes(cluster)

    def update() -> None:
        cluster.ask("PUT", config)
        cluster.until_running(lambda: _replica_processes(cluster).isdisjoint(before))

    check(under_streams(cluster, update))


def _replica_processes(cluster: LocalCluster) -> set[psutil.Process]:
    found = [process for one in cluster.group("replicas") for process in one.host.processes]
    return {process for process in found if "holdfast:Replica" in " ".join(process.cmdline())}

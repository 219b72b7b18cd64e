from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
from holdfast.cluster.serve import local
from holdfast.cluster.serve.directory import Member, Role, Snapshot
from holdfast.cluster.serve.local import num_cpus_of_our_own, share_cores
from holdfast.cluster.serve.serving import check_resources
from holdfast.cluster.serve.start_up import StartUp, wait_until_up
from holdfast.worker.config import ParallelConfig
from holdfast.worker.errors import ConfigurationError, ReplicaError


def config(replicas: int = 2, ranks: int = 2, address: str | None = None, threads: int | None = None) -> HoldfastConfig:
    return HoldfastConfig(
        cluster=ClusterConfig(replicas=replicas, address=address),
        parallel=ParallelConfig(tensor_parallel_size=ranks, num_threads=threads),
    )


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "num_cores", lambda: 8)


@pytest.mark.usefixtures("eight_cores")
def test_our_own_ray_counts_enough_cpus_for_every_rank_and_router():
    assert num_cpus_of_our_own(config(2, 2)) == 8
    assert num_cpus_of_our_own(config(4, 4)) == 18


@pytest.mark.usefixtures("eight_cores")
def test_ranks_on_one_machine_share_its_cores():
    assert share_cores(config(2, 2)).parallel.num_threads == 2
    assert share_cores(config(8, 2)).parallel.num_threads == 1
    assert share_cores(config(2, 2, threads=3)).parallel.num_threads == 3
    assert share_cores(config(2, 2, address="auto")).parallel.num_threads is None


@pytest.mark.usefixtures("eight_cores")
def test_the_ranks_of_all_models_share_the_machine():
    cluster = ClusterConfig(models=({"model": {"model": "./a"}, "replicas": 3}, {"model": {"model": "./b"}}))
    both = HoldfastConfig(cluster=cluster, parallel=ParallelConfig(tensor_parallel_size=2))
    assert num_cpus_of_our_own(both) == 10
    assert [one.parallel.num_threads for one in share_cores(both).each_model] == [1, 1]


def member(name: str, phase: str, done: int = 0, total: int = 1, address: str | None = None) -> Member:
    return Member(member_id=name, role=Role.REPLICA, phase=phase, done=done, total=total, address=address)


def test_a_start_up_tells_each_replica_and_phase_once_it_begins_and_ends():
    reports: list[tuple[str, int, int]] = []
    start_up = StartUp(lambda *report: reports.append(report), num_replicas={"": 2})
    steps: list[tuple[Member, ...]] = [
        (member("a", "starting"),),
        (member("a", "weights", 1, 4), member("b", "starting")),
        (member("a", "serving", address="h:1"), member("b", "starting")),
    ]
    for version, members in enumerate(steps):
        start_up.show(Snapshot(version=version, members=members, is_settled=True))
    assert [report for report in reports if report[0].startswith("replica")] == [
        ("replica 1/2: starting", 0, 1),
        ("replica 1/2: starting", 1, 1),
        ("replica 1/2: weights", 1, 4),
        ("replica 2/2: starting", 0, 1),
        ("replica 1/2: weights", 1, 1),
    ]


def test_our_own_ray_has_no_custom_resources(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "holdfast.cluster.serve.placement_groups.node_resources", lambda: [{"CPU": 4.0, "accelerator_type:T4": 1.0}]
    )
    check_resources(ClusterConfig(rank_resources={"accelerator_type:T4": 0.5}))
    wanted = ClusterConfig(router_resources={"front_door": 1.0})
    with pytest.raises(ConfigurationError, match=r"cluster.router_resources = .*front_door.*cluster.address"):
        check_resources(wanted)
    check_resources(wanted.model_copy(update={"address": "auto"}))


ONE_ROUTER = HoldfastConfig(cluster=ClusterConfig(replicas=2, routers=1))


def router(**linked: int) -> Member:
    return Member(member_id="r", role=Role.ROUTER, address="127.0.0.1:1", linked=tuple(linked.items()))


class Directory:
    """Answers each watch with the next of these members; the last one again and again."""

    def __init__(self, clock: list[float], *steps: tuple[float, tuple[Member, ...]]) -> None:
        self._clock, self._steps, self._version = clock, list(steps), 0
        self.watch = self
        self.remote = lambda version: self

    def result(self, timeout_s: float) -> Snapshot:
        seconds, members = self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        self._clock[0] += seconds
        self._version += 1
        assert self._version < 10, "it waits for ever"
        return Snapshot(version=self._version, members=members, is_settled=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("holdfast.cluster.serve.start_up.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def serving(name: str) -> Member:
    return replace(member(name, "serving", address="h:1"), model="m")


def test_a_cluster_is_ready_once_its_routers_reach_all_replicas(clock):
    replicas = serving("a"), serving("b")
    steps = (router(), *replicas), (router(m=1), *replicas), (router(m=2), *replicas)
    directory = Directory(clock, *((20.0, members) for members in steps))
    up = wait_until_up(ONE_ROUTER, {"m": 2}, directory, lambda *report: None)
    assert (up.routers, up.num_replicas) == (("127.0.0.1:1",), {"m": 2})
    assert clock == [60.0]


def test_a_directory_that_is_lost_during_the_start_is_asked_again(clock, monkeypatch):
    looks = []
    monkeypatch.setattr("holdfast.cluster.serve.start_up._raise_if_given_up", lambda *given: looks.append(given))
    directory = Directory(clock, (1.0, (router(m=1),)), (1.0, (router(m=2), serving("a"), serving("b"))))
    answers = directory.result
    lost = iter([RayActorError(), TimeoutError()])

    def result(timeout_s: float) -> Snapshot:
        if (error := next(lost, None)) is not None:
            raise error
        return answers(timeout_s)

    monkeypatch.setattr(directory, "result", result)
    assert wait_until_up(ONE_ROUTER, {"m": 2}, directory, lambda *report: None).num_replicas == {"m": 2}
    assert len(looks) == 2, "whether Serve has given up"


def test_a_cluster_whose_routers_reach_no_replica_is_never_ready(clock):
    directory = Directory(clock, (20.0, (router(m=1), serving("a"), serving("b"))))
    with pytest.raises(ReplicaError, match=r"127\.0\.0\.1:1 reaches 1 of 2 replicas of m, after 60 s"):
        wait_until_up(ONE_ROUTER, {"m": 2}, directory, lambda *report: None)

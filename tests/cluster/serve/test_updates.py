"""Steps of a rolling update over a cluster that obeys at once: their order, and what a failure leaves behind."""

from dataclasses import replace

import pytest

from holdfast.cluster.serve.directory import Member, Role, Snapshot
from holdfast.cluster.serve.updates import Update, UpdatePlan
from holdfast.router.dispatch.versions import VersionCounts
from holdfast.router.operator_state import NO_OPERATOR_STATE, Canary, Change, OperatorState
from holdfast.worker.errors import ConfigurationError, ReplicaError, UpdateRolledBackError

OLD, NEW = "h:m", "h:m#2"


class FakeCluster:
    """A cluster whose replicas come up and go at once, and what was done to it, in order."""

    def __init__(self, num_old: int = 2, version: str = "new", tokenizer: str = "t") -> None:
        self.replicas = {OLD: num_old}
        self.versions = {OLD: "old", NEW: version}
        self.tokenizers = {OLD: "t", NEW: tokenizer}
        self.operator_state: OperatorState = NO_OPERATOR_STATE
        self.done: list[str] = []
        self.most = num_old
        self.counts: dict[str, VersionCounts] = {}
        self.wrong: list[str] = []
        self.num_audited = 0
        self.comes_up = True
        self.time_s = 0.0
        self.on_sleep = lambda: None

    def now(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds
        self.on_sleep()

    def applications(self) -> list[str]:
        return sorted(self.replicas)

    def next_application(self) -> str:
        return NEW

    def snapshot(self) -> Snapshot:
        members = [
            Member(
                member_id=f"{name}.{number}",
                role=Role.REPLICA,
                address="h:1" if name == OLD or self.comes_up else None,
                model="m",
                application=name,
                version=self.versions[name],
                tokenizer_digest=self.tokenizers[name],
                phase="serving" if name == OLD or self.comes_up else "loading weights",
            )
            for name, total in self.replicas.items()
            for number in range(total)
        ]
        linked = (("m", sum(self.replicas.values())),)
        router = Member(member_id="f", role=Role.ROUTER, address="h:2", linked=linked)
        router = replace(router, counts=tuple(self.counts.values()))
        return Snapshot(version=1, members=(*members, router), is_settled=True)

    def order(self, change: Change) -> None:
        self.operator_state = change.applied_to(self.operator_state)
        self.done.append(change.name)

    def deploy(self) -> str:
        self.replicas[NEW] = 1
        self._note("deploy")
        return NEW

    def scale(self, application: str, num_replicas: int) -> None:
        self.replicas[application] = num_replicas
        self._note(f"{application}={num_replicas}")

    def delete(self, application: str) -> None:
        self.replicas.pop(application, None)
        self._note(f"delete {application}")

    def wrong_answers(self, version: str) -> list[str]:
        return self.wrong

    def count(self, version: str, **numbers: int) -> None:
        self.counts[version] = VersionCounts(model="m", version=version, **numbers)

    def _note(self, done: str) -> None:
        self.done.append(done)
        self.most = max(self.most, sum(self.replicas.values()))


def update(cluster: FakeCluster, **plan: object):
    return Update(cluster, UpdatePlan(model="m", **plan), lambda *_: None).run()


def is_as_before(cluster: FakeCluster, num_old: int = 2) -> bool:
    operator_state = cluster.operator_state
    return cluster.replicas == {OLD: num_old} and (operator_state.canaries, operator_state.held) == ((), frozenset())


@pytest.mark.parametrize(("num_old", "wanted"), [(1, None), (3, None), (3, 1), (1, 3)])
def test_one_of_the_new_comes_before_one_of_the_old_goes(num_old: int, wanted: int | None):
    cluster = FakeCluster(num_old)
    updated = update(cluster, num_replicas=wanted)
    assert (updated.old_version, updated.new_version, updated.num_replicas) == ("old", "new", wanted or num_old)
    assert cluster.replicas == {NEW: wanted or num_old}
    assert cluster.most == max(num_old, wanted or 0) + 1
    assert cluster.operator_state.retired == {("m", "old")}
    last = len(cluster.done) - 1 - cluster.done[::-1].index("with_retired")
    assert last < cluster.done.index(f"delete {OLD}")
    assert (cluster.operator_state.canaries, cluster.operator_state.held) == ((), frozenset())


def test_a_version_that_was_retired_before_may_come_back():
    cluster = FakeCluster()
    cluster.operator_state = NO_OPERATOR_STATE.with_retired("m", "new", True)
    update(cluster)
    assert cluster.operator_state.retired == {("m", "old")}


def test_what_is_of_the_same_version_is_not_retired():
    cluster = FakeCluster(version="old")
    update(cluster)
    assert cluster.operator_state.retired == frozenset()


def test_nothing_reaches_the_new_version_before_it_was_looked_at():
    cluster = FakeCluster(tokenizer="other")
    with pytest.raises(ConfigurationError, match="another tokenizer"):
        update(cluster)
    assert cluster.done.index("with_held") < cluster.done.index("deploy")
    assert is_as_before(cluster)


def test_a_replica_that_does_not_come_up_is_taken_back_in_time():
    cluster = FakeCluster()
    cluster.comes_up = False
    with pytest.raises(UpdateRolledBackError, match=r"does not serve after 60 s \(loading weights\)"):
        update(cluster, timeout_s=60.0)
    assert is_as_before(cluster)


def test_what_fails_halfway_is_undone():
    cluster = FakeCluster(num_old=3)
    scale = cluster.scale

    def fails_at_the_third(application: str, number: int) -> None:
        if (application, number) == (NEW, 3):
            raise ReplicaError("no room")
        scale(application, number)

    cluster.scale = fails_at_the_third
    with pytest.raises(UpdateRolledBackError, match="no room"):
        update(cluster)
    assert is_as_before(cluster, 3)
    assert ("m", "new") in cluster.operator_state.retired


def test_a_second_update_is_refused_while_one_is_under_way():
    cluster = FakeCluster()
    cluster.replicas[NEW] = 1
    with pytest.raises(ConfigurationError, match="2 separate applications"):
        update(cluster)
    assert cluster.done == []


def test_a_good_canary_is_promoted_once_it_has_served_enough():
    cluster = FakeCluster()
    shares = []

    def serve() -> None:
        shares.append(cluster.operator_state.canary_of("m"))
        cluster.count("old", num_finished=round(10 * cluster.time_s))
        cluster.count("new", num_finished=round(cluster.time_s))

    cluster.on_sleep = serve
    update(cluster, share=0.1, watch_s=10.0, min_requests=20)
    assert set(shares) == {Canary(model="m", version="new", share=0.1)}
    assert 20 <= cluster.time_s < 30
    assert cluster.replicas == {NEW: 2}


def test_requests_that_end_during_a_long_audit_count():
    """It takes longer than a canary is waited for."""
    cluster = FakeCluster()

    def audit(version: str) -> list[str]:
        cluster.time_s += 50.0
        cluster.count(version, num_finished=30)
        return []

    cluster.wrong_answers = audit
    update(cluster, share=0.1, watch_s=10.0, min_requests=20)
    assert cluster.replicas == {NEW: 2}


@pytest.mark.parametrize("fault", ["wrong", "failed", "lost", "idle"])
def test_a_bad_canary_is_taken_back(fault: str):
    cluster = FakeCluster()

    def serve() -> None:
        cluster.count("old", num_finished=100)
        if fault == "wrong":
            cluster.wrong = ["'1+1' gave '3'"]
        elif fault != "idle":
            cluster.count("new", num_finished=30, **{f"num_{fault}": 9})

    cluster.on_sleep = serve
    reasons = {
        "wrong": "wrong answers",
        "failed": "9 of 39",
        "lost": "9 of its replicas",
        "idle": "only 0 requests",
    }
    with pytest.raises(UpdateRolledBackError, match=reasons[fault]):
        update(cluster, share=0.1, watch_s=10.0)
    assert is_as_before(cluster)
    assert ("m", "new") in cluster.operator_state.retired
    assert "with_retired" in cluster.done[: cluster.done.index(f"delete {NEW}")]

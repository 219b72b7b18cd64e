import asyncio
from dataclasses import replace

import pytest

from holdfast.cluster.serve.directory import LEASE_S, SETTLED_S, Directory, DirectoryDeployment, Member, Role
from holdfast.cluster.serve.security import ClusterSecurity
from holdfast.router.operator_state import NO_OPERATOR_STATE, Change
from holdfast.worker.errors import InternalError, InvalidRequestError
from tests import loops

REPLICA = Member(member_id="r1", role=Role.REPLICA, address="127.0.0.1:1", model="demo", model_path="/demo")
ROUTER = Member(member_id="f1", role=Role.ROUTER, address="127.0.0.1:2")
STARTING = Member(member_id="r2", role=Role.REPLICA)


@pytest.fixture
def directory() -> Directory:
    return Directory(now_s=0.0)


def version(directory: Directory) -> int:
    return directory.snapshot(0.0).version


def test_members_are_found_by_role_once_they_serve(directory):
    for member in (REPLICA, ROUTER, STARTING):
        directory.renew(member, 0.0)
    snapshot = directory.snapshot(0.0)
    assert snapshot.serving(Role.REPLICA) == (REPLICA,)
    assert snapshot.serving(Role.ROUTER) == (ROUTER,)
    assert set(snapshot.members) == {REPLICA, ROUTER, STARTING}


def test_only_a_change_makes_a_new_version(directory):
    directory.renew(STARTING, 0.0)
    first = version(directory)
    directory.renew(STARTING, 1.0)
    assert version(directory) == first
    directory.renew(replace(STARTING, phase="loading"), 1.0)
    assert version(directory) == first + 1


def test_a_lease_that_is_not_renewed_runs_out(directory):
    directory.renew(REPLICA, 0.0)
    directory.renew(ROUTER, 0.0)
    directory.renew(ROUTER, LEASE_S)
    directory.expire(LEASE_S)
    assert directory.snapshot(0.0).serving(Role.REPLICA) == (REPLICA,)
    directory.expire(LEASE_S + 0.1)
    assert directory.snapshot(0.0).members == (ROUTER,)


def test_removing_is_at_once_and_twice_is_once(directory):
    directory.renew(REPLICA, 0.0)
    before = version(directory)
    directory.remove("r1")
    directory.remove("r1")
    assert directory.snapshot(0.0).members == ()
    assert version(directory) == before + 1


def test_a_young_directory_says_so():
    directory = Directory(now_s=100.0)
    assert not directory.snapshot(100.0 + SETTLED_S).is_settled
    assert directory.snapshot(100.1 + SETTLED_S).is_settled


async def _watch_through_a_change() -> None:
    hosted = DirectoryDeployment(ClusterSecurity(token="t"))
    first = await hosted.watch(0)
    waiting = asyncio.create_task(hosted.watch(first.version))
    await asyncio.sleep(0)
    assert not waiting.done()
    await hosted.renew(REPLICA)
    second = await waiting
    assert second.members == (REPLICA,)
    waiting = asyncio.create_task(hosted.watch(second.version))
    await hosted.renew(REPLICA)
    await hosted.remove("r1")
    assert (await waiting).members == ()


def test_a_watch_answers_when_something_changes():
    loops.run(asyncio.wait_for(_watch_through_a_change(), 5.0))


def removed(directory: Directory) -> frozenset[str]:
    return directory.snapshot(0.0).removed_models


def test_a_removed_model_stays_so_until_a_new_replica_serves_it(directory):
    directory.renew(REPLICA, 0.0)
    before = version(directory)
    directory.remove_model("demo")
    assert version(directory) > before
    directory.renew(replace(REPLICA, phase="draining"), 0.0)  # it is still there, for what runs on it
    directory.renew(STARTING, 0.0)
    assert removed(directory) == {"demo"}
    directory.renew(replace(STARTING, address="127.0.0.1:3", model="demo"), 0.0)
    assert removed(directory) == frozenset()


def test_an_order_is_news_and_a_directory_that_takes_over_learns_it_from_the_routers(directory):
    before = version(directory)
    directory.order(Change("with_drained", ("r1", True)).applied_to(directory.operator_state))
    assert (version(directory), directory.snapshot(0.0).operator_state.drained) == (before + 1, {"r1"})
    with pytest.raises(InternalError, match="order 1 came after order 1"):
        directory.order(Change("with_drained", ("r2", True)).applied_to(NO_OPERATOR_STATE))
    successor = Directory(now_s=0.0)
    successor.renew(replace(ROUTER, operator_state=directory.operator_state), 0.0)
    successor.renew(ROUTER, 1.0)  # one that has not heard of it yet
    assert successor.operator_state == directory.operator_state


def test_changes_that_there_are_not_are_refused():
    with pytest.raises(InvalidRequestError, match="must be one of with_drained"):
        Change("__class__", ()).applied_to(NO_OPERATOR_STATE)

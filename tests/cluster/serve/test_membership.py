import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from holdfast.cluster.serve.directory import Directory, Member, Role, Snapshot
from holdfast.cluster.serve.membership import Lease, WatchedDirectory, has_other_routers, tell_demand
from holdfast.router.demand import ModelDemand
from holdfast.router.links.replica_directory import DirectoryView, ReplicaEndpoint, RouterEndpoint
from holdfast.router.operator_state import NO_OPERATOR_STATE
from tests import loops, virtual_loop


def replica(number: int) -> Member:
    return Member(member_id=f"r{number}", role=Role.REPLICA, address=f"h:{number}", model="demo", model_path="/demo")


def endpoint(number: int) -> ReplicaEndpoint:
    return ReplicaEndpoint(replica_id=f"r{number}", address=f"h:{number}", model="demo", model_path="/demo")


def snapshot(version: int, *members: Member, is_settled: bool = True) -> Snapshot:
    return Snapshot(version=version, members=members, is_settled=is_settled)


class FakeMethod:
    """Stands for one method of a Serve handle."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def remote(self, argument: object) -> Any:
        return self._function(argument)


class FakeHandle:
    """A Serve handle whose directory is in this process. The first `num_failures` calls are lost."""

    def __init__(self, num_failures: int = 0) -> None:
        self.directory = Directory(now_s=0.0)
        self.num_renewals = 0
        self.renewed = asyncio.Event()
        self._num_failures = num_failures
        self.renew = FakeMethod(self._renew)
        self.remove = FakeMethod(self._remove)
        self.watch = FakeMethod(self._watch)

    @property
    def members(self) -> tuple[Member, ...]:
        return self.directory.snapshot(0.0).members

    async def _renew(self, member: Member) -> None:
        if self._num_failures:
            self._num_failures -= 1
            raise ConnectionError("the directory is being replaced")
        self.directory.renew(member, 0.0)
        self.num_renewals += 1
        self.renewed.set()

    async def _remove(self, member_id: str) -> None:
        self.directory.remove(member_id)

    async def _watch(self, seen_version: int) -> Snapshot:
        if self._num_failures:
            raise ConnectionError("the directory is being replaced")
        return self.directory.snapshot(0.0)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    loops.run(asyncio.wait_for(scenario, 10.0))


async def _renewed(handle: FakeHandle) -> None:
    handle.renewed.clear()
    await handle.renewed.wait()


async def _lease_of_a_member() -> None:
    handle = FakeHandle()
    lease = Lease(handle, Member(member_id="r1", role=Role.REPLICA))
    await _renewed(handle)
    lease.update(replica(1))
    await _renewed(handle)
    assert handle.members == (replica(1),)
    await lease.end()
    assert handle.members == ()
    renewals = handle.num_renewals
    for _ in range(10):
        await asyncio.sleep(0)
    assert handle.num_renewals == renewals


def test_a_lease_tells_changes_at_once_and_ends_with_the_member_gone():
    run(_lease_of_a_member())


async def _lease_through_an_outage() -> None:
    handle = FakeHandle(num_failures=1)
    lease = Lease(handle, replica(1))
    await _renewed(handle)
    assert handle.members == (replica(1),)
    await lease.end()


def test_a_lease_outlives_a_directory_that_fails():
    virtual_loop.run(_lease_through_an_outage())


class ScriptedHandle:
    """A Serve handle whose `watch` gives these answers, one after the other, then nothing more."""

    def __init__(self, *answers: Snapshot) -> None:
        self._answers = list(answers)
        self.seen: list[int] = []
        self.watch = FakeMethod(self._watch)

    async def _watch(self, seen_version: int) -> Snapshot:
        self.seen.append(seen_version)
        if not self._answers:
            await asyncio.Event().wait()
        return self._answers.pop(0)


async def _first_sets(handle: ScriptedHandle, number: int) -> list[frozenset[ReplicaEndpoint]]:
    sets = []
    async for view in WatchedDirectory(handle).watch():
        sets.append(view.endpoints)
        if len(sets) == number:
            break
    return sets


def sets_of(handle: ScriptedHandle, number: int) -> list[frozenset[ReplicaEndpoint]]:
    return loops.run(asyncio.wait_for(_first_sets(handle, number), 10.0))


def test_a_router_sees_each_set_of_serving_replicas_once():
    starting = Member(member_id="r2", role=Role.REPLICA)
    router = Member(member_id="f1", role=Role.ROUTER, address="h:9")
    handle = ScriptedHandle(
        snapshot(1, router), snapshot(2, replica(1), starting), snapshot(3, replica(1)), snapshot(4)
    )
    assert sets_of(handle, 3) == [frozenset(), {endpoint(1)}, frozenset()]
    assert handle.seen == [0, 1, 2, 3]


def test_a_replaced_directory_takes_no_replica_away_until_it_has_settled():
    handle = ScriptedHandle(
        snapshot(1, replica(1), replica(2)),
        snapshot(100, is_settled=False),
        snapshot(101, replica(3), is_settled=False),
        snapshot(102, replica(1), replica(3)),
    )
    assert sets_of(handle, 3) == [
        {endpoint(1), endpoint(2)},
        {endpoint(1), endpoint(2), endpoint(3)},
        {endpoint(1), endpoint(3)},
    ]


async def _others_of_a_router() -> None:
    handle = FakeHandle()
    for member in (router("mine"), replica(1)):
        handle.directory.renew(member, 0.0)
    assert not await has_other_routers(handle, "mine")
    handle.directory.renew(router("starting", address=None), 0.0)
    assert not await has_other_routers(handle, "mine")
    handle.directory.renew(router("other"), 0.0)
    assert await has_other_routers(handle, "mine")
    assert not await has_other_routers(FakeHandle(num_failures=1), "mine")


def router(member_id: str, address: str | None = "h:1") -> Member:
    return Member(member_id=member_id, role=Role.ROUTER, address=address)


def test_a_router_is_told_whether_another_one_serves():
    run(_others_of_a_router())


async def _first_removed(handle: ScriptedHandle, number: int) -> list[frozenset[str]]:
    removed = []
    async for view in WatchedDirectory(handle).watch():
        removed.append(view.removed_models)
        if len(removed) == number:
            break
    return removed


def test_a_replaced_directory_that_knows_of_no_removal_does_not_undo_one():
    handle = ScriptedHandle(
        snapshot(1, replica(1)),
        replace(snapshot(2), removed_models=frozenset({"demo"})),
        snapshot(100, router("f1"), is_settled=False),
        snapshot(101, router("f2")),
        snapshot(102, replica(2)),
    )
    seen = loops.run(asyncio.wait_for(_first_removed(handle, 3), 10.0))
    assert seen == [frozenset(), {"demo"}, frozenset()]
    assert handle.seen == [0, 1, 2, 100, 101]


class TellingHandle:
    """A directory that hears what routers see."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[ModelDemand, ...]]] = []
        self.note_demand = self

    def remote(self, router_id: str, demands: tuple[ModelDemand, ...]) -> Any:
        async def note() -> None:
            self.told.append((router_id, demands))

        return note()


def test_routers_tell_of_models_that_are_scaled_and_of_no_others():
    """Only what has changed, now and then what has not, and nothing at all where nobody asks."""

    async def scenario() -> None:
        handle, directory = TellingHandle(), WatchedDirectory(None)
        seen = [ModelDemand(model="a", num_open=1), ModelDemand(model="b", num_open=9)]
        task = asyncio.create_task(tell_demand(handle, "r", directory, lambda: tuple(seen)))
        await asyncio.sleep(10.0)
        assert handle.told == []
        directory.followed = (("a", 60.0),)
        directory.has_followed.set()
        await asyncio.sleep(1.1)
        assert handle.told == [("r", (ModelDemand(model="a", num_open=1),))]
        seen[0] = ModelDemand(model="a", num_open=2)
        await asyncio.sleep(0.6)
        assert [demands[0].num_open for _, demands in handle.told] == [1, 2]
        await asyncio.sleep(6.0)
        assert 4 <= len(handle.told) <= 6
        task.cancel()

    virtual_loop.run(scenario())


def test_a_router_hears_which_models_may_be_at_rest():
    async def scenario() -> None:
        handle = FakeHandle()
        handle.directory.demand("sleeps", 60.0, 0.0)
        handle.directory.demand("stays", None, 0.0)
        directory = WatchedDirectory(handle)
        view = await anext(directory.watch())
        assert view.cold_starts == (("sleeps", 60.0),)
        assert directory.followed == (("sleeps", 60.0), ("stays", None))
        assert directory.has_followed.is_set()

    run(scenario())


async def _first_views(handle: ScriptedHandle, number: int) -> list[DirectoryView]:
    views = []
    async for view in WatchedDirectory(handle).watch():
        views.append(view)
        if len(views) == number:
            break
    return views


def test_a_replaced_directory_takes_no_order_back():
    ordered = NO_OPERATOR_STATE.with_drained("r1", True)
    later = ordered.with_drained("r2", True)
    handle = ScriptedHandle(
        replace(snapshot(1, replica(1)), operator_state=ordered),
        snapshot(100, replica(1), is_settled=False),
        replace(snapshot(101, replica(1)), operator_state=later),
    )
    views = loops.run(asyncio.wait_for(_first_views(handle, 2), 10.0))
    assert [view.operator_state for view in views] == [ordered, later]


def test_replicas_of_a_held_application_are_not_dialled():
    new = replace(replica(2), application="h:demo#2")
    held = NO_OPERATOR_STATE.with_held("h:demo#2", True)
    handle = ScriptedHandle(
        replace(snapshot(1, replica(1), new), operator_state=held),
        replace(snapshot(2, replica(1), new), operator_state=held.with_held("h:demo#2", False)),
    )
    assert sets_of(handle, 2) == [{endpoint(1)}, {endpoint(1), endpoint(2)}]


def test_routers_hear_of_each_others_http_addresses_and_load():
    def told(number: int, num_open: int, *linked: tuple[str, int]) -> Member:
        return replace(router(f"f{number}"), http_address=f"h:800{number}", num_open=num_open, linked=linked)

    def endpoint_of(number: int, num_open: int, has_replicas: bool = True) -> RouterEndpoint:
        return RouterEndpoint(address=f"h:800{number}", num_open=num_open, has_replicas=has_replicas)

    handle = ScriptedHandle(
        snapshot(1, told(1, 3, ("demo", 2)), told(2, 0, ("demo", 0)), router("without")),
        snapshot(100, told(1, 5, ("demo", 1)), is_settled=False),
        snapshot(101, told(1, 5, ("demo", 1))),
    )
    views = loops.run(asyncio.wait_for(_first_views(handle, 3), 10.0))
    assert [view.routers for view in views] == [
        {endpoint_of(1, 3), endpoint_of(2, 0, has_replicas=False)},
        {endpoint_of(1, 5), endpoint_of(2, 0, has_replicas=False)},
        {endpoint_of(1, 5)},
    ]


def test_routers_hear_of_every_member_on_a_full_disk():
    full = [replace(replica(number), is_disk_full=True) for number in (1, 2)]
    handle = ScriptedHandle(snapshot(1, full[0], replica(2)), snapshot(2, *full), snapshot(3, replica(1), replica(2)))
    views = loops.run(asyncio.wait_for(_first_views(handle, 3), 10.0))
    assert [view.num_on_full_disks for view in views] == [1, 2, 0]

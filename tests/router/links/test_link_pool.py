"""Replicas that come, go, die, freeze, move and go dark, as callers see them."""

import asyncio

from holdfast.router.config import RouterConfig
from holdfast.router.links.link_pool import LinkPool
from holdfast.router.links.replica_directory import ReplicaEndpoint
from holdfast.router.operator_state import Change
from tests.fakes import FakeReplica, Wire
from tests.loops import on_each_loop
from tests.router.links.dialling import is_dialled
from tests.router.site import (
    collected,
    eventually,
    expected,
    num_open_is,
    refusal,
    request,
    site,
)

# --- replicas come and go ---


@on_each_loop
async def test_the_streams_of_a_killed_replica_go_on_and_nobody_can_tell():
    dying, living = await FakeReplica.start("dying"), await FakeReplica.start("living")
    async with site(dying, living) as place:
        streams = [collected(place.stub.GenerateStream(request(max_tokens=200, seed=seed))) for seed in range(8)]
        answers = asyncio.gather(*streams)
        await dying.until(lambda: dying.num_tokens >= 40)
        await dying.kill()
        for seed, chunks in enumerate(await answers):
            token_ids, text = expected("hello", seed, 200)
            assert [token_id for chunk in chunks for token_id in chunk.token_ids] == token_ids
            assert "".join(chunk.text for chunk in chunks) == text
        assert any(submit.output_token_ids for submit in living.submits)


@on_each_loop
async def test_a_replica_that_leaves_the_directory_is_empty_soon():
    leaving, staying = await FakeReplica.start("leaving"), await FakeReplica.start("staying")
    async with site(leaving, staying) as place:
        calls = [place.stub.Generate(request(max_tokens=300, seed=seed)) for seed in range(8)]
        await leaving.until(lambda: leaving.num_tokens >= 20)
        num_tokens = leaving.num_tokens
        place.directory.set([staying.endpoint])
        await leaving.until(lambda: leaving.is_idle)
        assert leaving.num_tokens < num_tokens + 400
        for seed, call in enumerate(calls):
            assert list((await call).completions[0].token_ids) == expected("hello", seed, 300)[0]
        place.replicas.remove(leaving)
        await leaving.kill()


@on_each_loop
async def test_every_replica_hears_the_log_level_once_and_again_when_its_link_is_new():
    async with site(await FakeReplica.start("old")) as place:
        (old,) = place.replicas
        for level in ("DEBUG", "DEBUG", "WARNING"):
            await place.router._alone(Change("with_log_level", (level,)))
        await old.until(lambda: old.log_levels == ["DEBUG", "WARNING"])
        new = await FakeReplica.start("new")
        place.directory.set([old.endpoint, new.endpoint])
        await new.until(lambda: new.log_levels == ["WARNING"])
        await place.until_up(2)
        await new.kill()
        again = await FakeReplica.start("new", port=new.port)
        await again.until(lambda: again.log_levels == ["WARNING"])
        await place.until_up(2)
        await again.kill()
    assert old.log_levels == ["DEBUG", "WARNING"]


@on_each_loop
async def test_requests_wait_for_a_replica_that_comes_back():
    first = await FakeReplica.start()
    async with site(first) as place:
        await first.kill()
        await place.until_up(0)
        call = place.stub.Generate(request())
        await eventually(lambda: num_open_is(place, 1))
        again = await FakeReplica.start(port=first.port)
        assert (await call).usage.completion_tokens == 8
        await again.kill()


@on_each_loop
async def test_without_any_replica_a_router_is_unavailable():
    async with site() as place:
        refused = await refusal(place.stub.Generate(request()))
        assert (refused.code, refused.retry_after_s) == ("UNAVAILABLE", 1.0)


@on_each_loop
async def test_a_replica_that_is_lost_for_good_does_not_hold_requests_for_ever():
    replica = await FakeReplica.start()
    async with site(replica, config=RouterConfig(replica_wait_s=0.1)) as place:
        await replica.kill()
        await place.until_up(0)
        refused = await refusal(place.stub.Generate(request()))
        assert refused.code == "UNAVAILABLE"
        assert "no replica of model 'fake' is up" in refused.message


@on_each_loop
async def test_the_directory_adds_retires_and_moves_replicas():
    first, second = await FakeReplica.start("r0"), await FakeReplica.start("r1")
    async with site(first) as place:
        place.directory.set([first.endpoint, second.endpoint])
        await place.until_up(2)
        call = place.stub.GenerateStream(request(max_tokens=100))
        await call.initial_metadata()
        place.directory.set([])
        chunks = await collected(call)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 100
        moved = await FakeReplica.start("r0")
        place.directory.set([moved.endpoint])
        await eventually(lambda: served_by(place, moved))
        await moved.kill()
        await second.kill()


async def served_by(place, replica: FakeReplica) -> bool:
    await place.stub.Generate(request(max_tokens=1))
    return bool(replica.submits)


@on_each_loop
async def test_a_stranger_at_the_address_is_not_taken_for_the_replica():
    replica, stranger = await FakeReplica.start("r0"), await FakeReplica.start("stranger")
    async with site(replica) as place:
        expected_there = FakeReplica("r1", "fake", 0)
        place.directory.set([replica.endpoint, expected_there.endpoint_at(stranger.port)])
        await eventually(lambda: is_dialled(stranger))
        await place.until_up(1)
        await stranger.kill()


@on_each_loop
async def test_a_network_that_goes_dark_is_noticed():
    replica = await FakeReplica.start()
    wire = await Wire.start(replica.port)
    config = RouterConfig(keepalive_s=0.1, keepalive_timeout_s=0.1, connect_timeout_s=0.2, replica_wait_s=0.5)
    async with site(config=config) as place:
        place.directory.set([replica.endpoint_at(wire.port)])
        await place.until_up(1)
        call = place.stub.Generate(request(max_tokens=10**6))
        await replica.until(lambda: replica.running)
        wire.go_dark()
        refused = await refusal(call)
        assert (refused.code, refused.reason) == ("UNAVAILABLE", "REPLICA_UNAVAILABLE")
        await place.until_up(0)
        await wire.stop()
        await replica.kill()


# --- frozen replicas ---


@on_each_loop
async def test_a_frozen_replica_is_given_up_and_one_that_only_takes_long_is_not():
    replica = await FakeReplica.start()
    replica.heartbeat_ms, replica.frozen_after_ms = 10, 1000
    async with site(replica) as place:
        replica.pause()
        call = place.stub.GenerateStream(request())
        await replica.until(lambda: replica.running)
        for progress in range(30):  # a step that lasts, and whose layers go by
            replica.beat(progress)
            await asyncio.sleep(0.05)
        assert len(replica.running) == 1
        await place.until_up(0)  # no heartbeat any more
        await replica.until(lambda: not replica.running)
        call.cancel()


@on_each_loop
async def test_a_replica_whose_counter_stands_still_is_frozen_for_all_its_heartbeats():
    replica = await FakeReplica.start()
    replica.heartbeat_ms, replica.frozen_after_ms = 10, 300
    async with site(replica) as place:
        replica.pause()
        call = place.stub.GenerateStream(request())
        await replica.until(lambda: replica.running)
        while replica.running:
            replica.beat(5)
            await asyncio.sleep(0.02)
        call.cancel()


@on_each_loop
async def test_an_idle_replica_may_be_silent():
    replica = await FakeReplica.start()
    replica.heartbeat_ms, replica.frozen_after_ms = 10, 100
    async with site(replica) as place:
        assert (await place.stub.Generate(request())).usage.completion_tokens == 8
        await asyncio.sleep(0.5)
        assert replica.num_links == 1


def test_a_node_that_is_gone_is_found_in_less_than_ten_seconds():
    config = RouterConfig()
    assert config.keepalive_s + config.keepalive_timeout_s < 10


# --- updates at the same time ---


class Dialled:
    """A link without a wire, whose end a test lets come."""

    def __init__(self, pool: "Pool", endpoint: ReplicaEndpoint) -> None:
        self.pool, self.endpoint, self.is_up, self.has_ended = pool, endpoint, True, False
        self.may_end = asyncio.Event()
        self.retired: list[bool] = []

    def start(self) -> None:
        self.pool.open.append(self.endpoint)
        ids = [one.replica_id for one in self.pool.open]
        assert len(ids) == len(set(ids)), "two links to one replica"

    def retire(self, is_retired: bool) -> None:
        self.retired.append(is_retired)

    def keep_adapters(self) -> None:
        """There are none."""

    def set_log_level(self, level: object) -> None:
        pass

    async def stop(self) -> None:
        self.pool.ending.append(self)
        await self.may_end.wait()
        self.pool.open.remove(self.endpoint)


class Pool:
    """A link pool, and what it has dialled."""

    def __init__(self, monkeypatch) -> None:
        self.open: list[ReplicaEndpoint] = []
        self.ending: list[Dialled] = []
        links = lambda endpoint, *_: Dialled(self, endpoint)  # noqa: E731
        monkeypatch.setattr("holdfast.router.links.link_pool.ReplicaLink", links)
        self.pool = LinkPool(None, None, RouterConfig())

    def update(self, **addresses: str) -> "asyncio.Task[None]":
        """Replicas by name and address."""
        return asyncio.create_task(self.pool.update(endpoints(**addresses)))


def endpoints(**addresses: str) -> frozenset[ReplicaEndpoint]:
    return frozenset(
        ReplicaEndpoint(replica_id=name, model="m", model_path="/nowhere", address=address)
        for name, address in addresses.items()
    )


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@on_each_loop
async def test_of_several_updates_at_a_time_the_last_one_holds(monkeypatch):
    place = Pool(monkeypatch)
    await place.update(a="1", b="1")
    moved = [place.update(a="2", b="1"), place.update(a="2", b="2"), place.update(c="1")]
    await turns()
    while place.ending:
        place.ending.pop().may_end.set()
        await turns()
    assert all(task.done() and task.exception() is None for task in moved)
    retired = {name: link.retired[-1:] == [True] for name, link in place.pool._links.items()}
    assert retired == {"a": True, "b": True, "c": False}
    assert {link.endpoint for link in place.pool._links.values()} == set(place.open)


@on_each_loop
async def test_a_pool_that_was_stopped_while_it_was_updated_dials_nobody(monkeypatch):
    place = Pool(monkeypatch)
    await place.update(a="1")
    moving = place.update(a="2", b="1")
    await turns()
    stopping = asyncio.create_task(place.pool.stop())
    late = place.update(c="1")
    await turns()
    while place.ending:
        place.ending.pop().may_end.set()
        await turns()
    await asyncio.gather(moving, stopping, late)
    assert place.open == []

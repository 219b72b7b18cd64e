"""Replicas that come, go, die, move and go dark, and faults of our own, as callers see them."""

import asyncio
import math

import grpc
import pytest

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.links.link import ReplicaLink
from holdfast.router.links.replica_directory import DirectoryView, StaticDirectory
from holdfast.router.orders import Change
from holdfast.router.router import Router
from holdfast.v1 import engine_pb2, inference_pb2, inference_pb2_grpc
from tests.fakes import FakeReplica, Wire, byte_tokenizer
from tests.loops import on_each_loop
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


async def is_dialled(replica: FakeReplica, times: int = 1) -> bool:
    return replica.num_links >= times


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


# --- faults of ours ---


@on_each_loop
async def test_a_link_that_breaks_by_our_fault_comes_back_and_its_requests_go_on(caplog, monkeypatch):
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        call = place.stub.Generate(request())
        await replica.until(lambda: replica.running)
        with monkeypatch.context() as patch:
            patch.setattr(DispatchHost, "replica_update", no_update)
            replica.say(engine_pb2.StepUpdate())
            await eventually(lambda: is_logged(caplog, "failed by a fault of ours"))
        replica.resume()
        assert list((await call).completions[0].token_ids) == expected("hello", 1, 8)[0]
        assert (await place.stub.Generate(request())).usage.completion_tokens == 8


def no_update(*args: object) -> None:
    raise RuntimeError("a fault of ours")


async def is_logged(caplog, text: str) -> bool:
    return text in caplog.text


@pytest.mark.parametrize(
    ("saying", "told"),
    [
        (engine_pb2.LinkResponse(step={"deltas": [{"attempt": 1, "finish_reason": 77}]}), "finish_reason = 77: must"),
        (engine_pb2.LinkResponse(heartbeat={"expected_gap_s": math.nan}), "expected_gap_s = nan: must be"),
        (engine_pb2.LinkResponse(), "of a kind that is not known here"),
        (b"\xff\xff\xff", "bytes that are no message"),
    ],
)
@on_each_loop
async def test_a_replica_that_cannot_be_understood_is_dialled_again_and_its_requests_go_on(caplog, saying, told):
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        call = place.stub.Generate(request())
        await replica.until(lambda: replica.running)
        replica.put(saying)
        await replica.until(lambda: replica.num_links == 2)
        replica.resume()
        assert list((await call).completions[0].token_ids) == expected("hello", 1, 8)[0]
        assert "replica r0 was lost (what it says cannot be read: " in caplog.text
        assert told in caplog.text
        assert "fault of ours" not in caplog.text


@pytest.mark.parametrize("nonsense", ["bytes", "second hello"])
@on_each_loop
async def test_a_replica_that_says_hello_and_then_nonsense_is_dialled_after_growing_pauses(monkeypatch, nonsense):
    """The dials succeed, so only the faulty sessions can make the pauses grow."""
    nums_doublings = []

    def no_pause(num_doublings: int, *args: object) -> float:
        nums_doublings.append(num_doublings)
        return 0.0

    monkeypatch.setattr("holdfast.router.replicas.backoff.growing_pause_s", no_pause)
    replica = await FakeReplica.start()
    replica.after_hello = [b"\xff\xff\xff" if nonsense == "bytes" else replica.hello()]
    directory = StaticDirectory([replica.endpoint])
    router = await Router.start(RouterConfig(), LimitsConfig(), directory, load_tokenizer=byte_tokenizer)
    await replica.until(lambda: replica.num_links == 5)
    await router.stop()
    await replica.kill()
    assert nums_doublings[:4] == [1, 2, 3, 4]


@on_each_loop
async def test_a_link_is_dialled_again_though_even_its_loss_meets_a_fault_of_ours(monkeypatch, caplog):
    """As an alarm that cannot be set: it breaks whatever comes by, and what is done about that."""
    replica, num_faults = await FakeReplica.start(), 0
    replica.pause()
    set_timer = DispatchHost._set_timer

    def break_twice(dispatch_host: DispatchHost) -> None:
        nonlocal num_faults
        num_faults += 1
        if num_faults <= 3:  # in the midst of news, then of the loss, then of ending what is open
            raise AttributeError("when")
        set_timer(dispatch_host)

    async with site(replica) as place:
        call = place.stub.Generate(request())
        await replica.until(lambda: replica.running)
        monkeypatch.setattr(DispatchHost, "_set_timer", break_twice)
        replica.resume()
        assert (await refusal(call)).code == "INTERNAL"
        assert "failed by a fault of ours" in caplog.text
        await eventually(lambda: is_dialled(replica, times=2))
        await place.until_up(1)
        assert (await place.stub.Generate(request())).usage.completion_tokens == 8


@on_each_loop
async def test_a_link_whose_watch_breaks_is_dialled_again(monkeypatch):
    """Without it, nobody would find the replica frozen."""
    replica, looks = await FakeReplica.start(), iter([1 / 2])
    replica.heartbeat_ms = 10
    monkeypatch.setattr("holdfast.router.links.link_watch.LinkWatch.look", lambda watch: next(looks, False) and 1 // 0)
    async with site(replica) as place:
        await eventually(lambda: is_dialled(replica, times=2))
        await place.until_up(1)
        assert (await place.stub.Generate(request())).usage.completion_tokens == 8


@on_each_loop
async def test_a_link_that_fails_in_the_moment_it_is_let_go_ends(monkeypatch):
    """gRPC takes a cancellation for its own where the call has failed already, and raises that failure instead."""
    talking = asyncio.Event()

    async def talk(link):
        talking.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()) from None

    monkeypatch.setattr(ReplicaLink, "_talk", talk)
    directory = StaticDirectory([FakeReplica("gone", "fake", 0.01).endpoint_at(1)])
    router = await Router.start(RouterConfig(), LimitsConfig(), directory, load_tokenizer=byte_tokenizer)
    await talking.wait()
    await asyncio.wait_for(router.stop(), 5)


@on_each_loop
async def test_a_call_that_breaks_by_our_fault_is_internal_and_logged(monkeypatch, caplog):
    async with site(await FakeReplica.start()) as place:

        def broken(self):
            raise ZeroDivisionError("secret")

        with monkeypatch.context() as patched:
            patched.setattr("holdfast.router.dispatch.dispatch_host.DispatchHost.loads", broken)
            refused = await refusal(place.stub.GetLoad(inference_pb2.GetLoadRequest()))
        assert refused.code == "INTERNAL"
        assert "secret" not in refused.message
        assert "secret" in caplog.text


@on_each_loop
async def test_a_directory_that_fails_is_asked_again_and_the_links_stay(monkeypatch, caplog):
    replica = await FakeReplica.start()
    monkeypatch.setattr("holdfast.router.links.link_pool.WATCH_AGAIN_S", 0.01)
    router = await Router.start(RouterConfig(), LimitsConfig(), MoodyDirectory(replica), load_tokenizer=byte_tokenizer)
    await eventually(lambda: is_dialled(replica))
    assert "the replica directory failed" in caplog.text
    await router.stop()
    await replica.kill()


class MoodyDirectory:
    """Fails at first."""

    def __init__(self, replica: FakeReplica) -> None:
        self._replica = replica
        self._num_watches = 0

    async def watch(self):
        self._num_watches += 1
        if self._num_watches == 1:
            raise ConnectionError("no directory")
        yield DirectoryView(endpoints=frozenset([self._replica.endpoint]))
        await asyncio.Event().wait()


@on_each_loop
async def test_a_model_whose_tokenizer_cannot_be_read_is_not_up(caplog):
    replica = await FakeReplica.start()
    directory = StaticDirectory([replica.endpoint])
    router = await Router.start(RouterConfig(max_reconnect_s=0.05), LimitsConfig(), directory)
    await eventually(lambda: is_dialled(replica))
    async with grpc.aio.insecure_channel(router.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await eventually(lambda: is_said(caplog, "/nowhere"))
        assert not (await stub.ListModels(inference_pb2.ListModelsRequest())).models
    await router.stop()
    await replica.kill()


async def is_said(caplog, text: str) -> bool:
    return text in caplog.text


# --- frozen replicas ---


@on_each_loop
async def test_a_frozen_replica_is_given_up_and_one_that_only_takes_long_is_not():
    replica = await FakeReplica.start()
    replica.heartbeat_ms, replica.frozen_after_ms = 10, 300
    async with site(replica) as place:
        replica.pause()
        call = place.stub.GenerateStream(request())
        await replica.until(lambda: replica.running)
        for progress in range(20):  # a step that lasts, and whose layers go by
            replica.beat(progress)
            await asyncio.sleep(0.05)
        assert len(replica.running) == 1
        await place.until_up(0)  # no heartbeat any more
        assert not replica.running
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

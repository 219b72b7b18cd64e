"""Faults of Holdfast's, and replicas that talk nonsense: the link is dialled again, and requests go on."""

import asyncio
import math

import grpc
import pytest

from benchmarks.static_directory import StaticDirectory
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.links.replica_directory import DirectoryView
from holdfast.router.links.replica_link import ReplicaLink
from holdfast.router.server.router import Router
from holdfast.v1 import engine_pb2, inference_pb2, inference_pb2_grpc
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_each_loop
from tests.router.links.dialling import is_dialled, is_logged
from tests.router.site import (
    eventually,
    expected,
    refusal,
    request,
    site,
)


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
            await eventually(lambda: is_logged(caplog, "failed: internal error"))
        replica.resume()
        assert list((await call).completions[0].token_ids) == expected("hello", 1, 8)[0]
        assert (await place.stub.Generate(request())).usage.completion_tokens == 8


def no_update(*args: object) -> None:
    raise RuntimeError("an internal error")


@pytest.mark.parametrize(
    ("saying", "message"),
    [
        (engine_pb2.LinkResponse(step={"deltas": [{"attempt": 1, "finish_reason": 77}]}), "finish_reason = 77: must"),
        (engine_pb2.LinkResponse(heartbeat={"expected_gap_s": math.nan}), "expected_gap_s = nan: must be"),
        (engine_pb2.LinkResponse(), "of an unknown kind"),
        (b"\xff\xff\xff", "bytes that cannot be parsed"),
    ],
)
@on_each_loop
async def test_a_replica_that_cannot_be_understood_is_dialled_again_and_its_requests_go_on(caplog, saying, message):
    replica = await FakeReplica.start()
    replica.pause()
    async with site(replica) as place:
        call = place.stub.Generate(request())
        await replica.until(lambda: replica.running)
        replica.put(saying)
        await replica.until(lambda: replica.num_links == 2)
        replica.resume()
        assert list((await call).completions[0].token_ids) == expected("hello", 1, 8)[0]
        assert "replica r0 was lost (its message cannot be parsed: " in caplog.text
        assert message in caplog.text
        assert "fault of Holdfast's" not in caplog.text


@pytest.mark.parametrize("nonsense", ["bytes", "second hello"])
@on_each_loop
async def test_a_replica_that_says_hello_and_then_nonsense_is_dialled_after_growing_pauses(monkeypatch, nonsense):
    """The dials succeed, so only the faulty sessions can make the pauses grow."""
    nums_doublings = []

    def no_pause(num_doublings: int, *args: object) -> float:
        nums_doublings.append(num_doublings)
        return 0.0

    monkeypatch.setattr("holdfast.router.dispatch.circuit_breaker.growing_pause_s", no_pause)
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
        assert "failed: internal error" in caplog.text
        await eventually(lambda: is_dialled(replica, times=2))
        await place.until_up(1)
        assert (await place.stub.Generate(request())).usage.completion_tokens == 8


@on_each_loop
async def test_a_link_whose_watch_breaks_is_dialled_again(monkeypatch):
    """Without it, nobody would find the replica frozen."""
    replica, looks = await FakeReplica.start(), iter([1 / 2])
    replica.heartbeat_ms = 10
    monkeypatch.setattr(
        "holdfast.router.links.replica_link.LinkWatch.look", lambda watch: next(looks, False) and 1 // 0
    )
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
            patched.setattr("holdfast.router.dispatch.dispatch.Dispatch.loads", broken)
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
        await eventually(lambda: is_logged(caplog, "/nowhere"))
        assert not (await stub.ListModels(inference_pb2.ListModelsRequest())).models
    await router.stop()
    await replica.kill()

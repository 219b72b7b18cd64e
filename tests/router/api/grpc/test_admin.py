"""Operators' calls: what they change, who may make them, and what a dump has."""

import asyncio
import json
import logging

import grpc
import pytest

from benchmarks.static_directory import StaticDirectory
from holdfast.router.api.grpc.admin import SERVICE, AdminServicer
from holdfast.router.api.operators import Operators
from holdfast.router.cluster_control import (
    AddModel,
    ClusterModel,
    LogLine,
    ModelChanged,
    Progress,
    RemoveModel,
    RollbackModel,
    ScaleModel,
    UpdateModel,
)
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.security.api_keys import ApiKey, KeyRing, digest_of
from holdfast.router.security.gate import Gate
from holdfast.router.server.router import Router
from holdfast.v1 import admin_pb2 as pb
from holdfast.v1 import admin_pb2_grpc
from holdfast.worker.errors import PermissionDeniedError
from holdfast.worker.log_level import PACKAGE
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop
from tests.router.site import eventually, refusal, request, site


def operator_of(place) -> admin_pb2_grpc.AdminServiceStub:
    return admin_pb2_grpc.AdminServiceStub(place.channel)


@on_a_loop
async def test_a_drained_replica_gets_nothing_until_it_is_put_back():
    async with site(await FakeReplica.start(), await FakeReplica.start("r1")) as place:
        operator, first = operator_of(place), place.replicas[0]
        load = (await place.stub.GetLoad(pb_load())).replicas
        name = load[0].replica_id
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await operator.Drain(pb.DrainRequest(replica_id="nobody"))
        assert "must be one of" in caught.value.details()
        assert name in caught.value.details()
        assert (await operator.Drain(pb.DrainRequest(replica_id=name))).revision == 1
        dumped = json.loads((await operator.DumpState(pb.DumpStateRequest())).json)
        assert {one["replica_id"]: one["is_retiring"] for one in dumped["replicas"]}[name] is True
        assert dumped["orders"]["drained"] == [name]
        assert (await operator.Undrain(pb.UndrainRequest(replica_id=name))).revision == 2
        dumped = json.loads((await operator.DumpState(pb.DumpStateRequest())).json)
        assert not any(one["is_retiring"] for one in dumped["replicas"])
        with pytest.raises(grpc.aio.AioRpcError, match="drained are: none"):
            await operator.Undrain(pb.UndrainRequest(replica_id=name))
        assert first.is_idle


def pb_load():
    from holdfast.v1 import inference_pb2

    return inference_pb2.GetLoadRequest()


@on_a_loop
async def test_new_requests_of_a_paused_model_wait_or_are_refused():
    async with site(await FakeReplica.start()) as place:
        operator = operator_of(place)
        before = await place.stub.Generate(request())
        model = before.model
        await operator.Pause(pb.PauseRequest(model=model))
        waiting = asyncio.create_task(_ask(place))

        async def waits() -> bool:
            dumped = json.loads((await operator.DumpState(pb.DumpStateRequest())).json)
            return dumped["requests"]["paused"] == 1

        await eventually(waits)
        assert not waiting.done()
        await operator.Resume(pb.ResumeRequest(model=model))
        assert (await waiting).completions[0].text == before.completions[0].text
        await operator.Pause(pb.PauseRequest(model=model, refuse=True))
        refused = await refusal(place.stub.Generate(request()))
        assert (refused.code, refused.reason) == ("UNAVAILABLE", "MODEL_PAUSED")
        with pytest.raises(grpc.aio.AioRpcError, match="not served here"):
            await operator.Pause(pb.PauseRequest(model="nothing"))


async def _ask(place):
    return await place.stub.Generate(request())


@on_a_loop
async def test_the_log_level_changes_and_a_dump_has_recent_errors_and_no_exceptions_words():
    logger = logging.getLogger(PACKAGE)
    level = logger.level
    try:
        async with site(await FakeReplica.start()) as place:
            operator = operator_of(place)
            await operator.SetLogLevel(pb.SetLogLevelRequest(level="debug"))
            assert logger.level == logging.DEBUG
            with pytest.raises(grpc.aio.AioRpcError, match="must be one of DEBUG, INFO, WARNING, ERROR"):
                await operator.SetLogLevel(pb.SetLogLevelRequest(level="loud"))
            try:
                raise ValueError("a prompt's words")
            except ValueError:
                logging.getLogger(f"{PACKAGE}.x").exception("something failed")
            text = (await operator.DumpState(pb.DumpStateRequest())).json
            assert "something failed (ValueError)" in text
            assert "a prompt's words" not in text
            state = json.loads(text)
            assert {"releases", "models", "replicas", "versions", "requests", "orders", "settings"} <= state.keys()
    finally:
        logger.setLevel(level)


class _Keys:
    def __init__(self, *keys: ApiKey) -> None:
        self._ring = KeyRing(keys)

    def ring(self) -> KeyRing:
        return self._ring


@on_a_loop
async def test_where_keys_are_asked_for_an_operators_alone_will_do():
    keys = [
        ApiKey(name=name, sha256=digest_of(f"hfk_{name}").hex(), operator=name == "root") for name in ("root", "user")
    ]
    router = await Router.start(
        RouterConfig(),
        LimitsConfig(),
        StaticDirectory(),
        load_tokenizer=lambda _: byte_tokenizer(),
        gate=Gate(_Keys(*keys)),
    )
    try:
        async with grpc.aio.insecure_channel(router.address) as channel:
            operator = admin_pb2_grpc.AdminServiceStub(channel)
            for key, code in (("", "UNAUTHENTICATED"), ("hfk_user", "PERMISSION_DENIED"), ("hfk_root", "OK")):
                metadata = (("authorization", f"Bearer {key}"),) if key else ()
                for call, message in (
                    (operator.DumpState, pb.DumpStateRequest()),
                    (operator.SetLogLevel, pb.SetLogLevelRequest(level="WARNING")),
                ):
                    try:
                        await call(message, metadata=metadata)
                        met = "OK"
                    except grpc.aio.AioRpcError as error:
                        met = error.code().name
                    assert met == code
    finally:
        await router.stop()


class _Peer:
    def __init__(self, address: str) -> None:
        self._address = address

    def peer(self) -> str:
        return self._address


@pytest.mark.parametrize(
    ("peer", "may"),
    [("ipv4:127.0.0.1:5", True), ("ipv6:%5B::1%5D:5", True), ("ipv4:10.0.0.7:5", False), ("ipv6:[fe80::1]:5", False)],
)
def test_without_keys_callers_of_this_machine_alone_are_heard(peer: str, may: bool):
    servicer = AdminServicer(
        Operators(None, None, gate=Gate(), send=None, operator_state=None, dump=lambda: "{}", pins=None)
    )
    call = servicer.DumpState(pb.DumpStateRequest(), _Peer(peer))
    if may:
        assert asyncio.run(call).json == "{}"
    else:
        with pytest.raises(PermissionDeniedError, match="this machine alone"):
            asyncio.run(call)


class _Control:
    """A cluster with one model, which makes every change in two steps."""

    def __init__(self) -> None:
        self.changes: list[object] = []
        self.is_undone = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def list_models(self) -> list[ClusterModel]:
        facts = {
            "status": "RUNNING",
            "num_replicas": 2,
            "versions": {"v": 2},
            "settings": "{}",
            "adapters": {"a": "d"},
            "pinned_adapters": ("a",),
        }
        return [ClusterModel(name="m", **facts)]

    async def change(self, change):
        self.changes.append(change)
        try:
            yield Progress("checking", 1, 1)
            await self.may_end.wait()
            yield ModelChanged(model="m", num_replicas=2, old_version="v", new_version="w", removed_applications=("a",))
        except GeneratorExit:
            self.is_undone.set()
            raise
        except asyncio.CancelledError:
            self.is_undone.set()
            raise

    async def read_logs(self, process: str, num_lines: int, *, follows: bool):
        yield [LogLine(f"router {process} {num_lines} {follows}", "a line")]


CHANGES = [
    ({"add": {"settings": '{"model": {"model": "demo"}}'}}, AddModel(settings={"model": {"model": "demo"}})),
    ({"update": {"model": "m", "settings": "{}"}}, UpdateModel(model="m", settings={})),
    (
        {"update": {"model": "m", "canary_share": 0.5, "canary_seconds": 0, "min_requests": 3}},
        UpdateModel(model="m", settings={}, canary_share=0.5, canary_s=0.0, min_requests=3),
    ),
    ({"rollback": {"model": "m"}}, RollbackModel(model="m")),
    ({"remove": {"model": "m", "drain_timeout_seconds": 0}}, RemoveModel(model="m", drain_timeout_s=0.0)),
    ({"scale": {"model": "m", "num_replicas": 3}}, ScaleModel(model="m", num_replicas=3)),
]
BAD_CHANGES = [
    ({}, "change = None: must be one of add"),
    ({"add": {"settings": "{"}}, "add.settings"),
    ({"add": {"settings": "[1]"}}, "must be a JSON object"),
    ({"remove": {}}, "remove.model"),
    ({"scale": {"model": "m"}}, "scale.num_replicas = 0"),
    ({"update": {"model": "m", "canary_share": 1.5}}, "update.canary_share = 1.5"),
    ({"update": {"model": "m", "canary_share": float("nan")}}, "update.canary_share"),
]


@on_a_loop
async def test_a_router_of_a_cluster_changes_models_and_reads_logs():
    control = _Control()
    async with site(await FakeReplica.start(), control=control) as place:
        operator = operator_of(place)
        (model,) = (await operator.ListClusterModels(pb.ListClusterModelsRequest())).models
        assert (model.name, model.num_replicas, dict(model.versions), model.settings) == ("m", 2, {"v": 2}, "{}")
        assert dict(model.adapters) == {"a": "d"}
        for fields, change in CHANGES:
            events = [event async for event in operator.ChangeModel(pb.ChangeModelRequest(**fields))]
            assert (events[0].progress.phase, events[-1].result.new_version) == ("checking", "w")
            assert control.changes.pop() == change
        for fields, message in BAD_CHANGES:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [event async for event in operator.ChangeModel(pb.ChangeModelRequest(**fields))]
            assert (caught.value.code(), control.changes) == (grpc.StatusCode.INVALID_ARGUMENT, [])
            assert message in caught.value.details()
        request = pb.ReadLogsRequest(process="x", num_lines=3, follow=True)
        (batch,) = [message async for message in operator.ReadLogs(request)]
        assert [(one.process, one.text) for one in batch.lines] == [("router x 3 True", "a line")]


@on_a_loop
async def test_a_cancelled_change_is_undone_and_a_router_without_a_cluster_has_none():
    control = _Control()
    control.may_end.clear()
    async with site(await FakeReplica.start(), control=control) as place:
        call = operator_of(place).ChangeModel(pb.ChangeModelRequest(remove={"model": "m"}))
        assert (await call.read()).progress.phase == "checking"
        call.cancel()
        await asyncio.wait_for(control.is_undone.wait(), 10)
    async with site(await FakeReplica.start()) as place:
        with pytest.raises(grpc.aio.AioRpcError, match="outside a Ray cluster") as caught:
            await operator_of(place).ListClusterModels(pb.ListClusterModelsRequest())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("method", list(SERVICE.methods), ids=lambda method: method.name)
def test_no_method_is_open_to_another_machine_without_keys(method):
    """Whatever a method does: this one and those that are still to come."""
    operators = Operators(
        None, None, gate=Gate(), send=None, operator_state=None, dump=lambda: "{}", pins=None, control=_Control()
    )
    request = getattr(pb, method.input_type.name)()
    call = getattr(AdminServicer(operators), method.name)(request, _Peer("ipv4:10.0.0.7:5"))
    with pytest.raises(PermissionDeniedError, match="this machine alone"):
        asyncio.run(_first(call))


async def _first(call):
    return await (anext(call) if hasattr(call, "__anext__") else call)

"""gRPC servicer of operators, `holdfast.v1.AdminService`."""

import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, Final

from holdfast.router.api.grpc.handlers import Context
from holdfast.router.api.operators import Operators
from holdfast.router.cluster_control import (
    AddModel,
    ModelChange,
    Progress,
    RemoveModel,
    RollbackModel,
    ScaleModel,
    UpdateModel,
)
from holdfast.router.links.replica_pins import UnheardReplica
from holdfast.v1 import admin_pb2
from holdfast.worker.errors import InvalidRequestError

SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]

_LOOPBACK: Final = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "ipv6:[::ffff:127.", "unix:")


class AdminServicer:
    """Method by method. Errors are raised as `HoldfastError`."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators

    async def Drain(self, message: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        return admin_pb2.DrainResponse(revision=await self._checked(context).drain(message.replica_id))

    async def Undrain(self, message: admin_pb2.UndrainRequest, context: Context) -> admin_pb2.UndrainResponse:
        return admin_pb2.UndrainResponse(revision=await self._checked(context).undrain(message.replica_id))

    async def Pause(self, message: admin_pb2.PauseRequest, context: Context) -> admin_pb2.PauseResponse:
        return admin_pb2.PauseResponse(revision=await self._checked(context).pause(message.model, message.refuse))

    async def Resume(self, message: admin_pb2.ResumeRequest, context: Context) -> admin_pb2.ResumeResponse:
        return admin_pb2.ResumeResponse(revision=await self._checked(context).resume(message.model))

    async def SetLogLevel(
        self, message: admin_pb2.SetLogLevelRequest, context: Context
    ) -> admin_pb2.SetLogLevelResponse:
        return admin_pb2.SetLogLevelResponse(revision=await self._checked(context).set_log_level(message.level))

    async def LoadAdapter(
        self, message: admin_pb2.LoadAdapterRequest, context: Context
    ) -> admin_pb2.LoadAdapterResponse:
        adapter = await self._checked(context).load_adapter(
            message.model, message.name, message.path, replaces=message.replace, pinned=message.pinned
        )
        return admin_pb2.LoadAdapterResponse(digest=adapter.digest)

    async def UnloadAdapter(
        self, message: admin_pb2.UnloadAdapterRequest, context: Context
    ) -> admin_pb2.UnloadAdapterResponse:
        await self._checked(context).unload_adapter(message.name)
        return admin_pb2.UnloadAdapterResponse()

    async def ListPins(self, _: admin_pb2.ListPinsRequest, context: Context) -> admin_pb2.ListPinsResponse:
        pins, unheard = await self._checked(context).pins.listed()
        return admin_pb2.ListPinsResponse(
            pins=[admin_pb2.Pin(**one._asdict()) for one in pins], unheard=_unheard(unheard)
        )

    async def Unpin(self, message: admin_pb2.UnpinRequest, context: Context) -> admin_pb2.UnpinResponse:
        num_blocks, unheard = await self._checked(context).pins.unpin(message.tenant, message.prefix)
        return admin_pb2.UnpinResponse(num_blocks=num_blocks, unheard=_unheard(unheard))

    async def DumpState(self, message: admin_pb2.DumpStateRequest, context: Context) -> admin_pb2.DumpStateResponse:
        return admin_pb2.DumpStateResponse(json=self._checked(context).dump())

    async def ListClusterModels(
        self, _: admin_pb2.ListClusterModelsRequest, context: Context
    ) -> admin_pb2.ListClusterModelsResponse:
        models = await self._checked(context).control.list_models()
        return admin_pb2.ListClusterModelsResponse(models=[admin_pb2.ClusterModel(**asdict(one)) for one in models])

    async def ChangeModel(
        self, message: admin_pb2.ChangeModelRequest, context: Context
    ) -> AsyncGenerator[admin_pb2.ChangeModelResponse, None]:
        async with aclosing(self._checked(context).control.change(_change(message))) as events:
            async for event in events:
                if isinstance(event, Progress):
                    progress = admin_pb2.ModelChangeProgress(phase=event.phase, done=event.done, total=event.total)
                    yield admin_pb2.ChangeModelResponse(progress=progress)
                else:
                    yield admin_pb2.ChangeModelResponse(result=admin_pb2.ModelChangeResult(**asdict(event)))

    async def ReadLogs(
        self, message: admin_pb2.ReadLogsRequest, context: Context
    ) -> AsyncGenerator[admin_pb2.ReadLogsResponse, None]:
        control = self._checked(context).control
        async with aclosing(control.read_logs(message.process, message.num_lines, follows=message.follow)) as batches:
            async for lines in batches:
                yield admin_pb2.ReadLogsResponse(
                    lines=[admin_pb2.LogLine(process=one.process, text=one.text) for one in lines]
                )

    def _checked(self, context: Context) -> Operators:
        peer = str(context.peer())
        self._operators.check("" if peer.startswith(_LOOPBACK) else f"this one comes from {peer}")
        return self._operators


def _unheard(replicas: Iterable[UnheardReplica]) -> list[admin_pb2.UnheardReplica]:
    return [admin_pb2.UnheardReplica(**one._asdict()) for one in replicas]


_CHANGES: Final[dict[str, type[Any]]] = {
    "add": AddModel,
    "update": UpdateModel,
    "rollback": RollbackModel,
    "remove": RemoveModel,
    "scale": ScaleModel,
}
_NAMES: Final = {"drain_timeout_seconds": "drain_timeout_s", "canary_seconds": "canary_s"}


def _change(message: admin_pb2.ChangeModelRequest) -> ModelChange:
    """Fields that are not set keep their defaults. Raises `InvalidRequestError`."""
    kind = message.WhichOneof("change")
    if kind is None:
        raise InvalidRequestError("change", None, f"must be one of {', '.join(_CHANGES)}")
    fields: dict[str, Any] = {
        _NAMES.get(one.name, one.name): value for one, value in getattr(message, kind).ListFields()
    }
    if kind in ("add", "update"):
        fields["settings"] = _settings(f"{kind}.settings", fields.get("settings", ""))
    if kind != "add" and not fields.get("model"):
        raise InvalidRequestError(f"{kind}.model", "", "must name a model")
    if kind == "scale" and not fields.get("num_replicas"):
        raise InvalidRequestError("scale.num_replicas", 0, "must be at least 1")
    if not 0 <= (share := fields.get("canary_share", 0.0)) <= 1:
        raise InvalidRequestError("update.canary_share", share, "must be in [0, 1]")
    change: ModelChange = _CHANGES[kind](**fields)
    return change


def _settings(field: str, text: str) -> dict[str, Any]:
    """Raises `InvalidRequestError`."""
    try:
        settings = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(field, text[:100], f"must be JSON ({error})") from None
    if not isinstance(settings, dict):
        raise InvalidRequestError(field, text[:100], "must be a JSON object: sections, each with its settings")
    return settings

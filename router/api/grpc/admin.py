"""gRPC servicer of operators, `holdfast.v1.AdminService`."""

from typing import Final

from holdfast.router.api.grpc.handlers import Context
from holdfast.router.api.operators import Operators
from holdfast.v1 import admin_pb2

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

    async def DumpState(self, message: admin_pb2.DumpStateRequest, context: Context) -> admin_pb2.DumpStateResponse:
        return admin_pb2.DumpStateResponse(json=self._checked(context).dump())

    def _checked(self, context: Context) -> Operators:
        peer = str(context.peer())
        self._operators.check("" if peer.startswith(_LOOPBACK) else f"this one comes from {peer}")
        return self._operators

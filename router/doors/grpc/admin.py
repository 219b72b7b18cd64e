"""gRPC servicer of operators, `holdfast.v1.AdminService`: orders to all routers of a cluster, and a state dump.

What may live here: the methods, and who may call them. What may not: how orders reach the routers
(`cluster/serve/directory.py`), and what obeys them.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.doors.grpc.handlers import Context
from holdfast.router.orders import Change, Orders, Pause
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.security.gate import Gate
from holdfast.v1 import admin_pb2
from holdfast.worker.errors import InvalidRequestError, PermissionDeniedError

SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]

_LOOPBACK: Final = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "ipv6:[::ffff:127.", "unix:")

SendChange = Callable[[Change], Awaitable[Orders]]
"""Has a change obeyed by all routers. Returns what holds then; raises `CallerError`, `ReplicaError`."""


class AdminServicer:
    """Method by method. Errors are raised as `HoldfastError`."""

    def __init__(
        self,
        request_processor: RequestProcessor,
        dispatch_host: DispatchHost,
        gate: Gate,
        send: SendChange,
        orders: Callable[[], Orders],
        dump: Callable[[], str],
    ) -> None:
        self._request_processor = request_processor
        self._dispatch_host = dispatch_host
        self._gate = gate
        self._send = send
        self._orders = orders
        self._dump = dump

    async def Drain(self, message: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        self._check(context)
        known = sorted(one.replica_id for one in self._dispatch_host.loads())
        if message.replica_id not in known:
            raise InvalidRequestError("replica_id", message.replica_id, f"must be one of {', '.join(known) or 'none'}")
        orders = await self._send(Change("with_drained", (message.replica_id, True)))
        return admin_pb2.DrainResponse(revision=orders.revision)

    async def Undrain(self, message: admin_pb2.UndrainRequest, context: Context) -> admin_pb2.UndrainResponse:
        self._check(context)
        drained = sorted(self._orders().drained)
        if message.replica_id not in drained:
            raise InvalidRequestError("replica_id", message.replica_id, f"drained are: {', '.join(drained) or 'none'}")
        orders = await self._send(Change("with_drained", (message.replica_id, False)))
        return admin_pb2.UndrainResponse(revision=orders.revision)

    async def Pause(self, message: admin_pb2.PauseRequest, context: Context) -> admin_pb2.PauseResponse:
        self._check(context)
        model = self._request_processor.model(message.model).name
        orders = await self._send(Change("with_pause", (model, Pause(model=model, refuses=message.refuse))))
        return admin_pb2.PauseResponse(revision=orders.revision)

    async def Resume(self, message: admin_pb2.ResumeRequest, context: Context) -> admin_pb2.ResumeResponse:
        self._check(context)
        model = self._request_processor.model(message.model).name
        orders = await self._send(Change("with_pause", (model, None)))
        return admin_pb2.ResumeResponse(revision=orders.revision)

    async def SetLogLevel(
        self, message: admin_pb2.SetLogLevelRequest, context: Context
    ) -> admin_pb2.SetLogLevelResponse:
        self._check(context)
        orders = await self._send(Change("with_log_level", (message.level,)))
        return admin_pb2.SetLogLevelResponse(revision=orders.revision)

    async def DumpState(self, message: admin_pb2.DumpStateRequest, context: Context) -> admin_pb2.DumpStateResponse:
        self._check(context)
        return admin_pb2.DumpStateResponse(json=self._dump())

    def _check(self, context: Context) -> None:
        """Raises `PermissionDeniedError`. Where keys are asked for, the key has passed the gate."""
        self._gate.caller().check_operator()
        if not self._gate.is_locked and not str(context.peer()).startswith(_LOOPBACK):
            told = "without API keys, operators' calls are taken from this machine alone"
            raise PermissionDeniedError("operator", told)

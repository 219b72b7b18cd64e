"""Authentication interceptor: every call of a gRPC server passes the gate first, those of reflection too.

What may not live here: what a key may do (`router/security/`).
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from holdfast.router.doors.grpc.handlers import Begun, Context
from holdfast.router.security.gate import Gate, bearer
from holdfast.router.wire.statuses import call_status
from holdfast.worker.errors import HoldfastError

OPEN: Final = (
    "/grpc.health.v1.Health/",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
    "/vllm.grpc.engine.VllmEngine/HealthCheck",
    "/envoy.service.ext_proc.v3.ExternalProcessor/",
)
"""For balancers, Kubernetes and gateways: what is served is not told, only whether; and, of an endpoint picker, the
addresses of routers.
"""

OF_OPERATORS: Final = (
    "/holdfast.v1.AdminService/",
    "/holdfast.v1.Inference/GetLoad",
    "/grpc.channelz.v1.Channelz/",
)
"""They tell of all tenants, or touch all."""


class Authentication(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # it takes none when it runs
    """Asks once for each call, before any of its messages is read."""

    def __init__(self, gate: Gate, begun: Begun) -> None:
        """`begun` is told of the calls that are refused."""
        self._gate = gate
        self._begun = begun

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        method = str(details.method)
        if method.startswith(OPEN):
            return await continuation(details)
        try:
            caller = self._gate.enter(_presented(details))
            if method.startswith(OF_OPERATORS):
                caller.check_operator()
        except HoldfastError as error:
            return _refusing(error, self._begun)
        return await continuation(details)


def _presented(details: grpc.HandlerCallDetails) -> str:
    for name, value in details.invocation_metadata or ():
        if name == "authorization" and isinstance(value, str):
            return bearer(value)
    return ""


def _refusing(error: HoldfastError, begun: Begun) -> "grpc.RpcMethodHandler[Any, Any]":
    """Ends any call at once, whether it streams or not: it waits for no message."""

    async def call(requests: Any, context: Context) -> None:
        begun(context)
        status = call_status(error)
        await context.abort(status.code, status.message, status.trailing_metadata)

    return grpc.stream_stream_rpc_method_handler(call)

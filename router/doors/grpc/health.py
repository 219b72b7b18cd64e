"""gRPC health servicer (grpc.health.v1): whether this router can serve, overall and per model.

The empty name and the API's service name are SERVING while any model has a replica up; a model's name is SERVING while
that model has one. gRPC's own asyncio servicer drops the other watchers of a name when one disconnects; this one does
not.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from holdfast.router.events import ModelStatus

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

OVERALL: Final = ("", "holdfast.v1.Inference")

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # a class without types
    """Answers with the state that was published last."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = dict.fromkeys(OVERALL, False)
        self._changed = asyncio.Event()
        self._is_stopping = False

    def publish(self, models: Iterable[ModelStatus]) -> None:
        """Sets the state and wakes the watchers."""
        serving = {model.name: model.num_replicas > 0 for model in models}
        self._serving = dict.fromkeys(OVERALL, any(serving.values())) | serving
        self._wake()

    def stop(self) -> None:
        """Reports NOT_SERVING for every name from here on."""
        self._is_stopping = True
        self._wake()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == _SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.service!r} is served here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The current status, then every change. Unknown names can be watched: they may be served later."""
        sent = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != sent:
                yield health_pb2.HealthCheckResponse(status=status)
            sent = status
            if self._is_stopping:
                return
            await changed.wait()

    def _status(self, name: str) -> int:
        if name not in self._serving:
            return int(_SERVICE_UNKNOWN)
        return int(_SERVING if self._serving[name] and not self._is_stopping else _NOT_SERVING)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

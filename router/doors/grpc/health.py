"""gRPC health servicer (grpc.health.v1): whether this router can serve, overall and per model.

The empty name and the names of services are SERVING while any model is; a model's name is SERVING while that model has
a replica up, or is at rest and woken by a request. gRPC's own asyncio servicer drops the other watchers of a name when
one disconnects, and has no List.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Final

from holdfast.foreign import health_pb2
from holdfast.router.doors.grpc.handlers import Context
from holdfast.router.events import ModelStatus
from holdfast.worker.errors import UnknownModelError

SERVICE: Final = health_pb2.DESCRIPTOR.services_by_name["Health"]
OVERALL: Final = ("", "holdfast.v1.Inference", "inference.GRPCInferenceService")

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer:
    """Answers with the state that was published last."""

    def __init__(self, overall: Sequence[str] = OVERALL, always: Sequence[str] = ()) -> None:
        """`overall` are the names that stand for the whole server; those of `always` say that the process runs."""
        self._always = always
        self._overall = overall
        self._serving: dict[str, bool] = dict.fromkeys(overall, False) | dict.fromkeys(always, True)
        self._changed = asyncio.Event()
        self._is_stopping = False

    def publish(self, models: Iterable[ModelStatus]) -> None:
        """Sets the state and wakes the watchers."""
        serving = {model.name: model.takes_requests for model in models}
        overall = dict.fromkeys(self._overall, any(serving.values()))
        self._serving = overall | serving | dict.fromkeys(self._always, True)
        self._wake()

    def stop(self) -> None:
        """Reports NOT_SERVING for every name from here on."""
        self._is_stopping = True
        self._wake()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == _SERVICE_UNKNOWN:
            raise UnknownModelError(request.service, tuple(self._serving))
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        statuses = {name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in self._serving}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
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

    def _status(self, name: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if name not in self._serving:
            return _SERVICE_UNKNOWN
        return _SERVING if self._serving[name] and not self._is_stopping else _NOT_SERVING

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

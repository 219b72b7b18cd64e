"""gRPC health servicer (grpc.health.v1): whether this router can serve, overall and per model.

The empty name and the names of services are SERVING while any model is; a model's name is SERVING while that model has
a replica up, or is at rest and woken by a request. gRPC's own asyncio servicer drops the other watchers of a name when
one disconnects, and has no List.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from functools import cache
from typing import Any, Final, TypeVar

import grpc
from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import Default, DescriptorPool
from grpc_reflection.v1alpha import reflection, reflection_pb2

from holdfast.foreign import health_pb2
from holdfast.router.api.grpc.decoding import Decode, MessageDecoder, StagedReads
from holdfast.router.api.grpc.handlers import Begun, Context
from holdfast.router.events import ModelStatus
from holdfast.router.wire.statuses import call_status
from holdfast.worker.errors import InvalidRequestError, UnknownModelError

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
        """Health of every service of this server."""
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


T = TypeVar("T")

_ALPHA: Final = "grpc.reflection.v1alpha"
_V1: Final = "grpc.reflection.v1"


def add_reflection(
    server: grpc.aio.Server,
    services: Iterable[ServiceDescriptor],
    decoder: MessageDecoder,
    reads: StagedReads,
    begun: Begun,
) -> None:
    """Tells clients of these services, and of reflection itself. Not yet started, as `server`."""
    served = tuple(services)
    alpha = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    own = [service.file.pool for service in served if service.file.pool is not Default()]
    pools = dict.fromkeys([*own, _v1_pool(), Default()])  # others may have registered less of a protocol by default
    names = [*(service.full_name for service in served), alpha.full_name, alpha.full_name.replace(_ALPHA, _V1)]
    servicer = reflection.aio.ReflectionServicer(names, pool=_Pools(tuple(pools)))  # type: ignore[attr-defined]
    decode = decoder.of(alpha.methods_by_name["ServerReflectionInfo"].input_type)
    handler = grpc.stream_stream_rpc_method_handler(
        _bounded(servicer.ServerReflectionInfo, decode, reads, begun),
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers(tuple(grpc.method_handlers_generic_handler(name, handlers) for name in names[-2:]))


def _bounded(
    method: Callable[..., AsyncIterator[Any]], decode: Decode, reads: StagedReads, begun: Begun
) -> Callable[..., AsyncGenerator[Any, None]]:
    """The method, with messages as bytes; a message beyond its bounds ends the call."""

    async def decoded(context: Context) -> AsyncGenerator[Any, None]:
        while (request := await reads.read(context.read())) is not None:
            yield await decode(request)

    async def call(_: Any, context: Context) -> AsyncGenerator[Any, None]:
        begun(context)
        try:
            async for answer in method(decoded(context), context):
                yield answer
        except InvalidRequestError as error:
            status = call_status(error)
            await context.abort(status.code, status.message, status.trailing_metadata)

    return call


@cache
def _v1_pool() -> DescriptorPool:
    """The protocol's definition under the name of its v1, in a separate pool."""
    proto, renamed = FileDescriptorProto(), FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(proto)
    text_format.Parse(text_format.MessageToString(proto).replace(_ALPHA, _V1), renamed)
    renamed.name = "grpc/reflection/v1/reflection.proto"
    pool = DescriptorPool()
    pool.AddSerializedFile(renamed.SerializeToString())
    return pool


class _Pools:
    """Several pools as one, as far as reflection asks. Of a name that is in several, the first has the say."""

    def __init__(self, pools: Sequence[DescriptorPool]) -> None:
        self._pools = pools

    def FindFileByName(self, name: str) -> FileDescriptor:
        return self._first(lambda pool: pool.FindFileByName(name))

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        return self._first(lambda pool: pool.FindFileContainingSymbol(symbol))

    def FindMessageTypeByName(self, name: str) -> Descriptor:
        return self._first(lambda pool: pool.FindMessageTypeByName(name))

    def FindExtensionByNumber(self, message: Any, number: int) -> FieldDescriptor:
        return self._first(lambda pool: pool.FindExtensionByNumber(message, number))

    def FindAllExtensions(self, message: Any) -> list[FieldDescriptor]:
        return list(message.file.pool.FindAllExtensions(message))

    def _first(self, find: Callable[[DescriptorPool], T]) -> T:
        for pool in self._pools[:-1]:
            try:
                return find(pool)
            except KeyError:
                pass
        return find(self._pools[-1])

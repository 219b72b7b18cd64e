"""Transport of a client: how calls reach routers. One method, over gRPC unless a test brings another."""

import json
import os
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import grpc

from holdfast.router.router_losses import ROUTERS_LOST
from holdfast.router.wire.statuses import CallStatus, error_of
from holdfast.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from holdfast.worker.wire.loopback import proxy_on_the_way, reaching
from holdfast.worker.wire.tls import Tls

KEEPALIVE_MS: Final = 1_200
"""Silence after which a router is pinged. Routers accept one ping per second."""

PING_TIMEOUT_MS: Final = 1_500
"""A router that has not answered a ping for so long is left: at worst it was busy, and another continues as well."""

CHANNEL_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),  # the option that newer gRPC cores read
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 * 2**20),
    # A router that comes back is found soon. A pool shared by the process would impose its own, longer pauses.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
)


_OF_CONNECTIONS: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)

_UNREACHED: Final = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")
_NO_LOSS: Final = ("ping timeout", "keepalive watchdog timeout", "GOAWAY", "Cancelling all calls")
"""Messages of grpcio's core (read in 1.85) about lost connections besides "Socket closed" and the like."""

_UNREAD: Final = ("sendmsg", "recvmsg", "Transport closed")
"""Messages for a connection that ended before the call was written, or with unread bytes, when the kernel resets it. If
the router has read everything, the kernel closes it: "Stream removed (Socket closed)"."""


class CallFailed(Exception):
    """A call has ended with another status than OK: a router said so, or none could be reached."""

    def __init__(self, status: CallStatus, *, is_router_lost: bool = False) -> None:
        """`is_router_lost`: the connection has ended without the router's word, after the router had read the call."""
        super().__init__(f"{status.code.name}: {status.message}")
        self.status = status
        self.is_router_lost = is_router_lost


class Transport(Protocol):
    """Carries the calls of one client, on one event loop."""

    def call(
        self,
        address: str,
        method: str,
        request: Any,
        on_taken: Callable[[], None] | None = None,
        num_routers_lost: int = 0,
    ) -> AsyncGenerator[Any, None]:
        """Messages that the router at `address` answers to a method of `holdfast.v1.Inference`; a unary method answers
        with one. Closing the generator cancels the call.

        `on_taken` is called when the router has let the request in, which may be long before it answers. The router is
        sent `num_routers_lost`: the number of routers that ended while they were reading the request. Raises
        `CallFailed`.
        """

    async def close(self) -> None:
        """Ends all calls and connections."""


class GrpcTransport:
    """A channel to each router, made when it is first called."""

    def __init__(self, api_key: str = "", tls: Tls | None = None) -> None:
        """An `api_key` is sent with each call. Without `tls`, connections are not encrypted."""
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else None
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stamp = None if tls is None else tls.stamp
        self._left: list[grpc.aio.Channel] = []
        """Reopens channels whose TLS files have been replaced; running calls continue."""

    async def call(
        self,
        address: str,
        method: str,
        request: Any,
        on_taken: Callable[[], None] | None = None,
        num_routers_lost: int = 0,
    ) -> AsyncGenerator[Any, None]:
        """Opens a call, and yields its responses. Raises `CallFailed`."""
        stub = inference_pb2_grpc.InferenceStub(self._channel(address))  # type: ignore[no-untyped-call]
        metadata = self._metadata
        if num_routers_lost:
            metadata = (*(metadata or ()), (ROUTERS_LOST, str(num_routers_lost)))
        call = getattr(stub, method)(request, metadata=_with_trace(metadata))
        try:
            if await call.initial_metadata() and on_taken is not None:
                on_taken()
            if isinstance(call, grpc.aio.UnaryUnaryCall):
                yield await call
            else:
                async for message in call:
                    yield message
        except grpc.aio.AioRpcError as error:
            status = _status(error, address)
            raise CallFailed(status, is_router_lost=_is_router_lost(status)) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """Closes all channels."""
        for channel in (*self._channels.values(), *self._left):
            await channel.close(None)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self._tls is not None and (stamp := self._tls.stamp) != self._stamp:
            self._left += self._channels.values()
            self._channels, self._stamp = {}, stamp
        if address not in self._channels:
            options = reaching(address, CHANNEL_OPTIONS)
            self._channels[address] = (
                grpc.aio.insecure_channel(address, options=options)
                if self._tls is None
                else grpc.aio.secure_channel(address, self._tls.channel_credentials(), options=options)
            )
        return self._channels[address]


def _status(error: Any, address: str) -> CallStatus:
    """Status of a call to `address` that failed. Its message names a proxy of the environment on the way."""
    trailers: Any = error.trailing_metadata() or ()  # pairs, whatever the stubs say
    message = error.details() or ""
    if message.startswith(_UNREACHED) and (name := proxy_on_the_way(address, os.environ)):
        message += f"; {name} is set, so the way to {address} is by a proxy: no_proxy may name the routers' hosts"
    return CallStatus(code=error.code(), message=message, trailing_metadata=tuple(map(tuple, trailers)))


def _is_router_lost(status: CallStatus) -> bool:
    """Whether a connection broke after a router had read the call. A connection attempt that failed has cost no router,
    and a router that answers no ping is frozen or unreachable, which no request causes: gRPC answers pings on separate
    threads. If other calls of the connection were in transit, a call that was read may look unread; routers identify it
    by their journals.
    """
    is_unreached = status.message.startswith(_UNREACHED) or any(one in status.message for one in (*_NO_LOSS, *_UNREAD))
    return status.details is None and status.code in _OF_CONNECTIONS and not is_unreached


def _with_trace(metadata: tuple[tuple[str, str], ...] | None) -> tuple[tuple[str, str], ...] | None:
    """Adds the W3C trace context of the caller's span, if the program uses OpenTelemetry and has a current span."""
    if "opentelemetry.trace" not in sys.modules:
        return metadata
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not get_current_span().get_span_context().is_valid:
        return metadata
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return (*(metadata or ()), *carrier.items())


_SERVICES: Final = ("holdfast.v1.Inference", "inference.GRPCInferenceService")

SERVICE_CONFIG: Final = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        # Each router is watched by gRPC's health protocol, and gets calls while it has a replica and does not stop.
        "healthCheckConfig": {"serviceName": ""},
        "methodConfig": [
            {
                "name": [{"service": service} for service in _SERVICES],
                # Only before the first answer: a stream that has begun is not gRPC's to repeat. A router that says when
                # to come again (grpc-retry-pushback-ms) is followed.
                "retryPolicy": {
                    "maxAttempts": 5,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "2s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
                },
            }
        ],
    }
)
"""JSON, for the channel option `grpc.service_config`."""


TIMEOUT_S: Final = 30.0


def call_admin(
    server: str, method: str, fields: Mapping[str, object], api_key: str = "", tls: Tls | None = None
) -> Any:
    """The answer of the router at `server` (`host:port`) to a unary method of `AdminService`, whose request has these
    fields. Blocking. Raises `HoldfastError`.
    """
    with _admin_call(server, method, fields, api_key, tls, TIMEOUT_S) as call:
        return call


def stream_admin(
    server: str, method: str, fields: Mapping[str, object], api_key: str = "", tls: Tls | None = None
) -> Iterator[Any]:
    """The messages of a streaming method. Blocking, without a timeout; closing the iterator cancels the call.

    Raises `HoldfastError`.
    """
    with _admin_call(server, method, fields, api_key, tls, None) as call:
        try:
            yield from call
        finally:
            call.cancel()


@contextmanager
def _admin_call(
    server: str, method: str, fields: Mapping[str, object], api_key: str, tls: Tls | None, timeout_s: float | None
) -> Iterator[Any]:
    request = getattr(admin_pb2, f"{method}Request")(**fields)
    options = reaching(server, ())
    channel = (
        grpc.insecure_channel(server, options)
        if tls is None
        else grpc.secure_channel(server, tls.channel_credentials(), options)
    )
    metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
    with channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            yield getattr(stub, method)(request, metadata=metadata, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(_status(error, server)) from None  # a call as well, in both forms

"""Link server of a replica: `holdfast.v1.Engine` over gRPC, one stream per router, one message per step. When a
router's stream ends, for whatever reason, all requests that came through it are aborted.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from holdfast.v1 import engine_pb2
from holdfast.worker.engine.engine import Engine
from holdfast.worker.errors import HoldfastError, InvalidRequestError
from holdfast.worker.log_level import log_level, set_log_level
from holdfast.worker.model_info import ReplicaFacts
from holdfast.worker.replica.block_exchange import BlockExchange
from holdfast.worker.replica.link_traces import LinkTraces
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import AttemptKey
from holdfast.worker.step_update import Heartbeat, Hello, Rejection, StepUpdate
from holdfast.worker.wire.link_requests import LINK_BOUNDS, engine_request, kept_adapters
from holdfast.worker.wire.link_responses import (
    LinkMessageError,
    heartbeat_message,
    hello_message,
    step_messages,
)
from holdfast.worker.wire.link_security import UNSECURED, LinkSecurity
from holdfast.worker.wire.message_bounds import MalformedMessageError, bounded_parser

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),  # the option that newer gRPC cores read
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_pings_without_data", 0),
)

SERVICE: Final = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name

REFUSED: Final = "this replica is part of another cluster: the token is not the caller's"

Context: TypeAlias = "grpc.aio.ServicerContext[engine_pb2.LinkRequest, engine_pb2.LinkResponse]"


Answer = TypeVar("Answer", engine_pb2.SendBlocksResponse, engine_pb2.GetPinsResponse, engine_pb2.EndPinsResponse)

BlocksContext: TypeAlias = "grpc.aio.ServicerContext[engine_pb2.SendBlocksRequest, engine_pb2.SendBlocksResponse]"


class LinkServer:
    """Serves one replica to any number of routers. Made by `start`, on a running event loop."""

    def __init__(self, server: grpc.aio.Server, address: str, exchange: BlockExchange) -> None:
        self._server = server
        self.address = address
        self._exchange = exchange

    @classmethod
    async def start(
        cls,
        replica: Replica,
        *,
        replica_id: str,
        host: str = "127.0.0.1",
        port: int = 0,
        security: LinkSecurity = UNSECURED,
        tracer: "Tracer | None" = None,
        on_kill: Callable[[], None] | None = None,
    ) -> "LinkServer":
        """Listens on `host:port`; port 0 picks a free one. `security` says which routers are let in; with a `tracer`,
        attempts that come with a trace context are traced. `on_kill` ends this process at once on a router's order;
        without it, such orders are ignored. Raises `OSError` (RuntimeError in older grpcio) if the port is taken,
        `ConfigurationError` for certificates that cannot be used.
        """
        server = grpc.aio.server(options=SERVER_OPTIONS)
        exchange = BlockExchange(replica, security, host)
        servicer = EngineServicer(replica, replica_id, security, tracer, on_kill, exchange)
        server.add_generic_rpc_handlers((_handler(servicer),))
        bound = security.add_port(server, f"{host}:{port}")
        await server.start()
        return cls(server, f"{host}:{bound}", exchange)

    async def hand_pins_on(self, limit_s: float) -> None:
        """Waits at most this long until another replica has the prefixes that are pinned here, if one takes them."""
        await self._exchange.hand_pins_on(limit_s)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Ends every stream after at most `grace_s`; their requests are aborted."""
        await self._exchange.close()
        await self._server.stop(grace_s)


def _handler(servicer: "EngineServicer") -> "grpc.GenericRpcHandler[Any, Any]":
    """The generated one would read messages of any size."""
    serializer = engine_pb2.LinkResponse.SerializeToString
    link = grpc.stream_stream_rpc_method_handler(
        servicer.Link, bounded_parser(engine_pb2.LinkRequest, LINK_BOUNDS), serializer
    )
    blocks = grpc.unary_unary_rpc_method_handler(
        servicer.SendBlocks,
        bounded_parser(engine_pb2.SendBlocksRequest, LINK_BOUNDS),
        engine_pb2.SendBlocksResponse.SerializeToString,
    )
    pins = grpc.unary_unary_rpc_method_handler(
        servicer.GetPins,
        bounded_parser(engine_pb2.GetPinsRequest, LINK_BOUNDS),
        engine_pb2.GetPinsResponse.SerializeToString,
    )
    ended = grpc.unary_unary_rpc_method_handler(
        servicer.EndPins,
        bounded_parser(engine_pb2.EndPinsRequest, LINK_BOUNDS),
        engine_pb2.EndPinsResponse.SerializeToString,
    )
    methods = {"Link": link, "SendBlocks": blocks, "GetPins": pins, "EndPins": ended}
    return grpc.method_handlers_generic_handler(SERVICE, methods)


class EngineServicer:
    """Turns each router's call into a `RouterLink`."""

    def __init__(
        self,
        replica: Replica,
        replica_id: str,
        security: LinkSecurity = UNSECURED,
        tracer: "Tracer | None" = None,
        on_kill: Callable[[], None] | None = None,
        exchange: BlockExchange | None = None,
    ) -> None:
        self._exchange = exchange
        self._tracer = tracer
        self._on_kill = on_kill
        self._health = replica.health
        self._security = security
        self._engine = replica.engine
        self._info = replica.info
        self._replica_id = replica_id
        self._num_links = 0

    async def Link(
        self, requests: AsyncIterator[engine_pb2.LinkRequest], context: Context
    ) -> AsyncIterator[engine_pb2.LinkResponse]:
        if not self._security.admits(context.invocation_metadata() or ()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSED)
        self._num_links += 1
        traces = None if self._tracer is None else LinkTraces(self._tracer, self._replica_id)
        name, vocab_size = f"link-{self._num_links}", self._info.vocab_size
        link = RouterLink(self._engine, name, vocab_size, traces, self._on_kill, self._exchange)
        try:
            self._engine.attach(link)
        except HoldfastError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        tasks = [asyncio.create_task(link.read(requests)), asyncio.create_task(link.beat(self._health.heartbeat_s))]
        try:
            yield hello_message(self._hello())
            async for message in link.messages():
                yield message
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(link.failure))
        finally:
            for task in tasks:
                task.cancel()
            self._engine.detach(link)

    async def SendBlocks(
        self, request: engine_pb2.SendBlocksRequest, context: BlocksContext
    ) -> engine_pb2.SendBlocksResponse:
        if self._exchange is None:
            return engine_pb2.SendBlocksResponse(refusal="this replica sends no blocks")
        return await self._answer(context, self._exchange.offer(request))

    async def GetPins(
        self, request: engine_pb2.GetPinsRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> engine_pb2.GetPinsResponse:
        if self._exchange is None:
            return engine_pb2.GetPinsResponse()
        return await self._answer(context, self._exchange.pins(request))

    async def EndPins(
        self, request: engine_pb2.EndPinsRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> engine_pb2.EndPinsResponse:
        if self._exchange is None:
            return engine_pb2.EndPinsResponse()
        return await self._answer(context, self._exchange.end_pins(request))

    async def _answer(
        self, context: "grpc.aio.ServicerContext[Any, Any]", answer: Coroutine[Any, Any, Answer]
    ) -> Answer:
        """Answers a router, or another replica of the cluster."""
        if not self._security.admits(context.invocation_metadata() or ()):
            answer.close()
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSED)
        try:
            return await answer
        except InvalidRequestError as error:
            return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except HoldfastError as error:
            return await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    def _hello(self) -> Hello:
        return Hello(
            facts=ReplicaFacts.of(self._replica_id, self._info),
            load=self._engine.load,
            heartbeat_s=self._health.heartbeat_s,
            frozen_after_s=self._health.frozen_after_s,
        )


class RouterLink:
    """One router's stream: a `StepListener` whose other half lives on the event loop that made it."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        vocab_size: int,
        traces: LinkTraces | None = None,
        on_kill: Callable[[], None] | None = None,
        exchange: BlockExchange | None = None,
    ) -> None:
        """`name` is unique among the links of the engine: routers do not know each other's attempts."""
        self._exchange = exchange
        self._traces = traces
        self._on_kill = on_kill
        self._engine = engine
        self._name = name
        self._vocab_size = vocab_size
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[StepUpdate | Heartbeat | None] = asyncio.Queue()
        self._work_came = asyncio.Event()
        self.failure: HoldfastError | None = None

    # --- on the engine's thread ---

    def on_update(self, update: StepUpdate) -> None:
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, update)

    def on_failure(self, error: HoldfastError) -> None:
        self.failure = error
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, None)

    # --- on the event loop ---

    async def read(self, requests: AsyncIterator[engine_pb2.LinkRequest]) -> None:
        """Takes in the router's messages until its side of the stream ends; then ends the stream."""
        try:
            async for request in requests:
                self._take(request)
        except HoldfastError as error:
            self.failure = self.failure or error
        except (DecodeError, MalformedMessageError):
            self.failure = self.failure or LinkMessageError("the router has sent bytes that cannot be parsed")
        finally:
            self._outbox.put_nowait(None)

    async def beat(self, every_s: float) -> None:
        """Sends heartbeats with the progress so far while there is work. The engine cannot block this loop.

        An idle engine's heart need not beat: its router watches it only while it has requests of this link.
        """
        progress = self._engine.progress
        while True:
            await self._work_came.wait()
            self._work_came.clear()  # only here: later ones are looked up once more
            await asyncio.sleep(every_s)
            while self._engine.has_work:
                self._outbox.put_nowait(
                    Heartbeat(
                        progress=progress.count, expected_gap_s=progress.expected_gap_s, starved_s=progress.starved_s
                    )
                )
                await asyncio.sleep(every_s)

    async def messages(self) -> AsyncIterator[engine_pb2.LinkResponse]:
        while (news := await self._outbox.get()) is not None:
            if isinstance(news, Heartbeat):
                yield heartbeat_message(news)
            else:
                if self._traces is not None:
                    self._traces.note_sent(news)
                for message in step_messages(news):
                    yield message

    def _take(self, request: engine_pb2.LinkRequest) -> None:
        match request.WhichOneof("message"):
            case "submit":
                self._submit(request.submit)
            case "fetch_ahead":
                with suppress(InvalidRequestError):  # as a request it will be refused
                    later = engine_request(request.fetch_ahead, self._name, self._vocab_size)
                    self._engine.fetch_ahead(later, self, AttemptKey(self._name, request.fetch_ahead.attempt))
            case "abort":
                self._engine.abort(AttemptKey(self._name, request.abort.attempt))
            case "follow_cache":
                self._engine.follow_cache(self)
            case "set_log_level":
                set_log_level(log_level(request.set_log_level.level))
            case "take_pins":
                if self._exchange is not None:
                    self._exchange.take_pins(request.take_pins.address)
            case "keep_adapters":
                with suppress(InvalidRequestError):  # a router of another release
                    self._engine.adapters.keep(kept_adapters(request.keep_adapters))
            case "kill":
                self._kill()
            case _:
                raise LinkMessageError("the router has sent a message of a kind that is not known here")

    def _kill(self) -> None:
        if self._on_kill is None:
            logger.warning("a router asked this process to end, and router.killable is off: ignored")
            return
        logger.warning("a router ordered this process to end")
        self._on_kill()

    def _submit(self, submit: engine_pb2.Submit) -> None:
        """A request that cannot be run is rejected, and the link goes on."""
        attempt = AttemptKey(self._name, submit.attempt)
        try:
            request = engine_request(submit, self._name, self._vocab_size)
        except InvalidRequestError as error:
            rejection = Rejection(attempt=attempt, error=error)
            self._outbox.put_nowait(StepUpdate(load=self._engine.load, rejections=(rejection,)))
            return
        if self._traces is not None:
            self._traces.submitted(attempt, request)
        self._engine.submit(request, self, attempt)
        self._work_came.set()

"""gRPC servicer of the public API, `holdfast.v1.Inference`, and the server that has all services on one port."""

import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Final

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from holdfast.router.api.chat_answer import ChatDeltas, ChatPlan
from holdfast.router.api.connection_guard import ConnectionGuard
from holdfast.router.api.grpc.chunk_writer import ChunkEncoder, ChunkWriter
from holdfast.router.api.grpc.decoding import MessageDecoder, StagedReads
from holdfast.router.api.grpc.handlers import CallHooks, Context, Trailers, generic_handler
from holdfast.router.api.grpc.interceptors import (
    GZIP_OPTIONS,
    REQUEST_ID_HEADER,
    Authentication,
    CallWatch,
    Gzip,
    with_request_id,
)
from holdfast.router.api.grpc.pooling import PoolingCalls
from holdfast.router.api.grpc.standard_services import add_reflection
from holdfast.router.api.intake import DecodeWorker, Intake
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.events import StoreFigures
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.poison_watch import PoisonWatch
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.security.connection_budgets import ENDING_STREAMS
from holdfast.router.security.gate import Gate
from holdfast.router.wire.bounds import public_bounds
from holdfast.router.wire.request_codec import generation_request
from holdfast.router.wire.response_codec import generation_message, load_response, models_response
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import InvalidRequestError

SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"]

MAX_MS: Final = 2**31 - 1
"""gRPC's longest time, which means for ever."""

UNCOUNTED: Final = ("grpc.health.v1.Health", "holdfast.v1.AdminService", "grpc.channelz.v1.Channelz")
"""Services of balancers and operators, which are never refused for what others hold."""

MAX_ARRIVING: Final = 2**15
"""Most calls that wait to be handled, about three seconds' worth."""

HANDSHAKE_MS: Final = 20_000
"""Milliseconds for a new connection's handshake and its HTTP/2 settings."""


class InferenceServicer:
    """`holdfast.v1.Inference`, method by method. Errors are raised as `HoldfastError`."""

    def __init__(
        self,
        request_processor: RequestProcessor,
        dispatch_host: DispatchHost,
        decode_worker: DecodeWorker | None = None,
        store_figures: Callable[[], Awaitable[StoreFigures | None]] | None = None,
        max_message_bytes: int = LimitsConfig().max_message_bytes,
    ) -> None:
        """Large messages are decoded by the `decode_worker`, or by a separate one. `store_figures`: how much is
        stored, if anything. `max_message_bytes`: of an answer.
        """
        self._store_figures = store_figures
        self._request_processor = request_processor
        self._dispatch_host = dispatch_host
        self._decode_worker = decode_worker or DecodeWorker()
        self._pooling = PoolingCalls(request_processor, self._decode_worker, max_message_bytes)

    async def Generate(
        self, message: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        """The whole output in one response. Errors end the call with the status of `wire/statuses.py`."""
        request = await self._request(message, context)
        if request.resume is not None:
            raise InvalidRequestError("resume", "set", "is for GenerateStream; Generate answers with the whole output")
        plan = await ChatPlan.of(request, self._request_processor)
        opening = (
            self._request_processor.open
            if request.sampling_params.beam_width is None
            else self._request_processor.search
        )
        async with opening(plan.request, context.time_remaining()) as answer:
            await context.send_initial_metadata(((REQUEST_ID_HEADER, answer.request.request_id),))
            return generation_message(plan.read(await answer.whole()))

    async def GenerateStream(self, message: inference_pb2.GenerateRequest, context: Context) -> None:
        """Streams the output; tokens that arrive while a chunk is being written go into the next one."""
        request = await self._request(message, context)
        request.check_streamable()
        plan = await ChatPlan.of(request, self._request_processor)
        async with self._request_processor.open(plan.request, context.time_remaining()) as answer:
            await context.send_initial_metadata(((REQUEST_ID_HEADER, answer.request.request_id),))
            encode = ChunkEncoder(ChatDeltas(plan, answer.received) if plan.style is not None else None).encode
            with closing(ChunkWriter(context.write, encode, answer)) as writer:
                while not answer.is_over:
                    if not answer.is_set:
                        await answer.next()
                    await writer.settle()
                    if (delta := answer.read()) is not None:
                        await context.write(encode(delta))

    async def _request(self, message: inference_pb2.GenerateRequest, context: Context) -> GenerationRequest:
        cost = _cost(message)
        named = with_request_id(message, context)
        return await self._decode_worker.run(cost, partial(generation_request, named))

    async def Pool(self, message: inference_pb2.PoolRequest, context: Context) -> inference_pb2.PoolResponse:
        return await self._pooling.pool(message, context)

    async def Score(self, message: inference_pb2.ScoreRequest, context: Context) -> inference_pb2.ScoreResponse:
        return await self._pooling.score(message, context)

    async def Abort(self, message: inference_pb2.AbortRequest, context: Context) -> inference_pb2.AbortResponse:
        return inference_pb2.AbortResponse(was_open=self._request_processor.abort(message.request_id))

    async def Tokenize(
        self, message: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        return inference_pb2.TokenizeResponse(
            token_ids=await self._request_processor.tokenize(message.model, message.text)
        )

    async def Detokenize(
        self, message: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(
            text=await self._request_processor.detokenize(message.model, message.token_ids)
        )

    async def ListModels(
        self, message: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        return models_response(self._request_processor.models())

    async def GetLoad(self, message: inference_pb2.GetLoadRequest, context: Context) -> inference_pb2.GetLoadResponse:
        dispatch = self._dispatch_host.dispatch
        stored = None if self._store_figures is None else await self._store_figures()
        response = load_response(dispatch.num_queued, dispatch.num_open, dispatch.loads(), stored)
        for one in self._request_processor.sessions.spoiled():
            response.spoiled.add(
                tenant=one.tenant, rule=one.rule, num_requests=one.num_requests, num_tokens=one.num_tokens
            )
        return response


_BYTES_OF_MESSAGE: Final = 64
"""Bytes of text that take as long to read as a chat message without its text."""


def _cost(message: inference_pb2.GenerateRequest) -> int:
    """Bytes of text that take about as long to read as it."""
    if num_ids := len(message.token_ids.ids):
        return num_ids  # asking for its size would take longer
    return message.ByteSize() + _BYTES_OF_MESSAGE * len(message.chat.messages)


def build_server(
    servicers: Mapping[ServiceDescriptor, object],
    config: RouterConfig,
    limits: LimitsConfig,
    trailers: Trailers | None = None,
    gate: Gate | None = None,
    guard: ConnectionGuard | None = None,
    decode_worker: DecodeWorker | None = None,
    poison_watch: PoisonWatch | None = None,
    intake: Intake | None = None,
) -> grpc.aio.Server:
    """A server with these services and reflection, not yet bound or started. Made on a running event loop. `trailers`
    go with the end of every call. The `gate` lets calls in; without it all may come. The `guard` knows their
    connections. Large messages are decoded by the `decode_worker`, or one of the server's own. The `poison_watch`
    gets each request that is read. The `intake` counts bytes of calls, except those of `UNCOUNTED`.
    """
    gate = gate or Gate()
    watch = CallWatch(guard or ConnectionGuard(limits, asks_for_keys=gate.is_locked), gate)
    interceptors: list[grpc.aio.ServerInterceptor] = [watch]  # type: ignore[type-arg]  # it takes none when it runs
    if gate.is_locked:
        interceptors.append(Authentication(gate, watch.begun))
    if config.gzip_above is not None:
        interceptors.append(Gzip(config.gzip_above))
    server = grpc.aio.server(interceptors=interceptors, options=_options(config, limits))
    reads = StagedReads()
    uncounted = CallHooks(trailers, watch.came, watch.begun, reads, poison_watch)
    counted = replace(uncounted, intake=intake)
    decoder = MessageDecoder(public_bounds(limits), decode_worker or DecodeWorker())
    handlers = [
        generic_handler(service, servicer, decoder, uncounted if service.full_name in UNCOUNTED else counted)
        for service, servicer in servicers.items()
    ]
    server.add_generic_rpc_handlers(tuple(handlers))
    add_reflection(server, servicers, decoder, reads, watch.begun)
    return server


def _options(config: RouterConfig, limits: LimitsConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.so_reuseport", int(config.reuse_port)),
        # Above the first of these gRPC refuses at random, above the second always.
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_header_bytes),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        # By default gRPC cancels calls at random once 1,000 wait to be handled, and calls that have waited for 30 s.
        # Here all are handled, and rejected with a reason if there is no room. Calls beyond a connection's limit wait
        # in the client.
        ("grpc.max_concurrent_streams", config.max_concurrent_streams),
        ("grpc.http2.max_deallocating_streams", ENDING_STREAMS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.server.max_pending_requests", MAX_ARRIVING),
        ("grpc.server.max_pending_requests_hard_limit", MAX_ARRIVING),
        ("grpc.server_max_unrequested_time_in_server", math.ceil(limits.max_timeout_s)),
        # Keepalive detects clients that are gone without closing the connection, so that their requests are cancelled.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # Clients may ping once a second, to detect a router that is frozen or unreachable.
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        *_given_ms("grpc.max_connection_age_ms", config.max_connection_age_s),
        *_given_ms("grpc.max_connection_age_grace_ms", config.max_connection_age_grace_s),
        *(() if config.gzip_above is None else GZIP_OPTIONS),
    ]


def _given_ms(option: str, seconds: float | None) -> list[tuple[str, int]]:
    """An option in milliseconds, where a setting gives it."""
    return [] if seconds is None else [(option, min(math.ceil(seconds * 1000), MAX_MS))]

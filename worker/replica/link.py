"""The replica's end of the link: `holdfast.v1.Engine` over gRPC, one stream per router, one message per step.

What may live here: the stubs, bytes to plain data and back, and the hand-over between the engine's thread and the event
loop. What may not: decisions. When a router's stream ends, for whatever reason, all that came through it is aborted.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Final, TypeAlias

import grpc

from holdfast.v1 import engine_pb2, engine_pb2_grpc
from holdfast.worker.config import HealthConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine_core.link_session import LinkSession
from holdfast.worker.engine_updates import CacheChanges, EngineUpdate, Rejection
from holdfast.worker.errors import DeadlineExceededError, HoldfastError, InvalidRequestError
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import EngineLoad, EngineRequest, FinishReason, Priority, TokenDelta, TokenLogprob
from holdfast.worker.sampling_fields import TOKEN_WORLD, params_of
from holdfast.worker.stats import EngineStats
from holdfast.worker.suspicion import Suspicion

logger = logging.getLogger(__name__)

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),  # the one that newer gRPC cores go by
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_pings_without_data", 0),
)

Context: TypeAlias = "grpc.aio.ServicerContext[engine_pb2.LinkRequest, engine_pb2.LinkResponse]"

MAX_CACHE_EVENTS: Final = 4096
"""Of one message: 32 KiB, so that a large cache's snapshot comes in pieces."""

_FINISH_REASONS = {FinishReason.STOP: 1, FinishReason.LENGTH: 2, FinishReason.ABORT: 3}


class LinkServer:
    """Serves one replica to any number of routers. Made by `start`, on a running event loop."""

    def __init__(self, server: grpc.aio.Server, address: str) -> None:
        self._server = server
        self.address = address

    @classmethod
    async def start(cls, replica: Replica, *, replica_id: str, host: str = "127.0.0.1", port: int = 0) -> "LinkServer":
        """Listens on `host:port`; port 0 picks a free one. Raises `OSError` (RuntimeError in older grpcio) if taken."""
        server = grpc.aio.server(options=SERVER_OPTIONS)
        servicer = EngineServicer(replica.engine, replica.info, replica_id, replica.health)
        engine_pb2_grpc.add_EngineServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        bound = server.add_insecure_port(f"{host}:{port}")
        await server.start()
        return cls(server, f"{host}:{bound}")

    async def stop(self, grace_s: float = 0.0) -> None:
        """Ends every stream after at most `grace_s`; their requests are aborted."""
        await self._server.stop(grace_s)


class EngineServicer(engine_pb2_grpc.EngineServicer):
    """Turns each router's call into a `RouterLink`."""

    def __init__(self, engine: Engine, info: ModelInfo, replica_id: str, health: HealthConfig) -> None:
        self._health = health
        self._engine = engine
        self._info = info
        self._replica_id = replica_id
        self._num_links = 0

    async def Link(
        self, requests: AsyncIterator[engine_pb2.LinkRequest], context: Context
    ) -> AsyncIterator[engine_pb2.LinkResponse]:
        self._num_links += 1
        link = RouterLink(self._engine, LinkSession(f"link-{self._num_links}"))
        try:
            self._engine.attach(link)
        except HoldfastError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        tasks = [asyncio.create_task(link.read(requests)), asyncio.create_task(link.beat(self._health.heartbeat_s))]
        try:
            yield engine_pb2.LinkResponse(hello=self._hello())
            async for message in link.messages():
                yield message
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(link.failure))
        finally:
            for task in tasks:
                task.cancel()
            self._engine.detach(link)

    def _hello(self) -> engine_pb2.Hello:
        info = self._info
        return engine_pb2.Hello(
            replica_id=self._replica_id,
            model=info.name,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            tensor_parallel_size=info.tensor_parallel_size,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            row_invariant=info.row_invariant,
            numerics=info.numerics,
            answers_digest=info.answers_digest,
            load=_load_message(self._engine.load),
            heartbeat_ms=round(1000 * self._health.heartbeat_s),
            frozen_after_ms=round(1000 * self._health.frozen_after_s),
            eos_token_ids=sorted(info.eos_token_ids),
        )


class RouterLink:
    """One router's stream: a `StepListener` whose other half lives on the event loop that made it."""

    def __init__(self, engine: Engine, session: LinkSession) -> None:
        self._engine = engine
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[EngineUpdate | engine_pb2.Heartbeat | None] = asyncio.Queue()
        self.failure: HoldfastError | None = None

    # --- on the engine's thread ---

    def on_update(self, update: EngineUpdate) -> None:
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, update)

    def on_failure(self, error: HoldfastError) -> None:
        self.failure = error
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, None)

    # --- on the event loop ---

    async def read(self, requests: AsyncIterator[engine_pb2.LinkRequest]) -> None:
        """Passes on what the router says until it falls silent; then ends the stream."""
        try:
            async for request in requests:
                if request.HasField("submit"):
                    self._submit(request.submit)
                elif request.HasField("abort"):
                    self._engine.abort(self._session.request_id(request.abort.attempt))
                elif request.HasField("follow_cache"):
                    self._engine.follow_cache(self)
        except HoldfastError as error:
            self.failure = self.failure or error
        finally:
            self._outbox.put_nowait(None)

    async def beat(self, every_s: float) -> None:
        """Tells the router, while there is work, how far it has come. The engine cannot hold this loop up."""
        progress = self._engine.progress
        while True:
            await asyncio.sleep(every_s)
            if self._engine.has_work:
                heartbeat = engine_pb2.Heartbeat(progress=progress.count, expected_step_s=progress.expected_step_s)
                self._outbox.put_nowait(heartbeat)

    async def messages(self) -> AsyncIterator[engine_pb2.LinkResponse]:
        while (news := await self._outbox.get()) is not None:
            if isinstance(news, EngineUpdate):
                for message in self.to_messages(news):
                    yield engine_pb2.LinkResponse(step=message)
            else:
                yield engine_pb2.LinkResponse(heartbeat=news)

    def to_messages(self, update: EngineUpdate) -> Iterator[engine_pb2.StepUpdate]:
        """One message; more where the cache has more to tell than one takes."""
        first, *others = update.cache.parts(MAX_CACHE_EVENTS)
        load = _load_message(update.load)
        yield engine_pb2.StepUpdate(
            step_id=update.step_id,
            deltas=[self._delta(delta) for delta in update.deltas],
            rejections=[self._rejection(rejection) for rejection in update.rejections],
            load=load,
            cache_events=_cache_message(first),
            stats=None if update.stats is None else _stats_message(update.stats),
        )
        for part in others:
            yield engine_pb2.StepUpdate(step_id=update.step_id, load=load, cache_events=_cache_message(part))

    def _submit(self, submit: engine_pb2.Submit) -> None:
        request_id = self._session.request_id(submit.attempt)
        try:
            request = _engine_request(request_id, submit)
        except InvalidRequestError as error:
            rejection = Rejection(request_id=request_id, error=error)
            self._outbox.put_nowait(EngineUpdate(step_id=0, deltas=(), rejections=(rejection,), load=self._engine.load))
            return
        self._engine.submit(self._session.named(request, submit.attempt), self)

    def _delta(self, delta: TokenDelta) -> engine_pb2.Delta:
        return engine_pb2.Delta(
            attempt=self._session.attempt(delta.request_id),
            first_token_index=delta.first_token_index,
            num_cached_tokens=delta.num_cached_tokens,
            token_ids=delta.token_ids,
            finish_reason=_FINISH_REASONS[delta.finish_reason] if delta.finish_reason is not None else 0,
            logprobs=[_logprob_message(item) for item in delta.logprobs],
            prompt_logprobs=[_logprob_message(item) for item in delta.prompt_logprobs if item is not None],
        )

    def _rejection(self, rejection: Rejection) -> engine_pb2.Rejection:
        error = rejection.error
        return engine_pb2.Rejection(
            attempt=self._session.attempt(rejection.request_id),
            field=error.field if isinstance(error, InvalidRequestError) else "",
            message=error.limit if isinstance(error, InvalidRequestError) else str(error),
            retry_after_ms=round(1000 * error.retry_after_s) if error.retry_after_s else 0,
            deadline_exceeded=isinstance(error, DeadlineExceededError),
        )


def _engine_request(request_id: str, submit: engine_pb2.Submit) -> EngineRequest:
    draw = submit.draw
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(submit.prompt_token_ids),
        sampling_params=params_of(draw, TOKEN_WORLD),
        priority=Priority(submit.priority),
        output_token_ids=tuple(submit.output_token_ids),
        cache_salt=submit.cache_salt,
        tenant=submit.tenant,
        time_left_s=submit.time_left_ms / 1000 if submit.HasField("time_left_ms") else None,
        bad_word_token_ids=tuple(tuple(word.ids) for word in draw.bad_words),
        grammar=draw.grammar,
        group_id=submit.group_id,
        suspicion=Suspicion(submit.suspicion),
    )


def _logprob_message(item: TokenLogprob) -> engine_pb2.DrawnLogprob:
    return engine_pb2.DrawnLogprob(
        logprob=item.logprob,
        rank=item.rank,
        top_token_ids=[token_id for token_id, _ in item.top],
        top_logprobs=[logprob for _, logprob in item.top],
    )


def _load_message(load: EngineLoad) -> engine_pb2.Load:
    return engine_pb2.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        num_free_blocks=load.num_free_blocks,
        num_total_blocks=load.num_total_blocks,
        num_foreign_suspects=load.num_foreign_suspects,
    )


def _cache_message(changes: CacheChanges) -> engine_pb2.CacheEvents | None:
    """None, which leaves the field unset, where there is nothing to tell."""
    if not changes:
        return None
    return engine_pb2.CacheEvents(stored=changes.stored, evicted=changes.evicted)


def _stats_message(stats: EngineStats) -> engine_pb2.EngineStats:
    """Every field that the message has, by its name."""
    names = engine_pb2.EngineStats.DESCRIPTOR.fields_by_name
    return engine_pb2.EngineStats(**{name: getattr(stats, name) for name in names})

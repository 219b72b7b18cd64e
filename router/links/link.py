"""The router's end of the link to one replica: dials, listens, and dials again when the link is lost.

What may live here: the stream's life cycle and its gRPC options. What may not: which request goes where
(`dispatch.py`), what messages mean (`codec.py`). However a session ends, the listener hears of it once.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final, NoReturn, Protocol, TypeAlias

import grpc

from holdfast.router.config import RouterConfig
from holdfast.router.events import ReplicaFacts, SendAbort, SendSubmit, StepNews
from holdfast.router.links.codec import (
    abort_message,
    engine_load,
    follow_cache_message,
    replica_facts,
    step_news,
    submit_message,
)
from holdfast.router.links.link_watch import LinkWatch
from holdfast.router.links.replica_directory import ReplicaEndpoint
from holdfast.router.replicas.backoff import Backoff
from holdfast.v1 import engine_pb2, engine_pb2_grpc
from holdfast.worker.errors import HoldfastError, InternalError, ReplicaError
from holdfast.worker.request import EngineLoad

logger = logging.getLogger(__name__)

LinkCall: TypeAlias = "grpc.aio.StreamStreamCall[engine_pb2.LinkRequest, engine_pb2.LinkResponse]"

MAX_MESSAGE_BYTES: Final = 64 * 2**20


class LinkListener(Protocol):
    """Who wants to hear of a replica. After each `replica_up` comes one `replica_down`, and news only in between."""

    async def prepare(self, endpoint: ReplicaEndpoint) -> None:
        """The replica has said hello. Gets ready for it; if this raises, it is not up, and will be dialled again."""

    def replica_up(self, link: "ReplicaLink", facts: ReplicaFacts, load: EngineLoad) -> None: ...

    def replica_news(self, replica_id: str, news: StepNews) -> None: ...

    def replica_down(self, replica_id: str, error: HoldfastError) -> None: ...

    def is_busy(self, replica_id: str) -> bool:
        """Whether a replica that is up has something of ours to do."""


class ReplicaLink:
    """One replica, dialled until it is let go. A `ReplicaPort` while it is up."""

    def __init__(self, endpoint: ReplicaEndpoint, listener: LinkListener, config: RouterConfig) -> None:
        self.endpoint = endpoint
        self._listener = listener
        self._config = config
        self._outbox: asyncio.Queue[engine_pb2.LinkRequest] = asyncio.Queue()
        self.is_up = False
        self._is_retired = False
        self._frozen_s: float | None = None
        """For how long the replica of this session had stood still when it was given up for that."""
        self._backoff = Backoff(max_pause_s=config.max_reconnect_s)
        self._task: asyncio.Task[None] | None = None

    # --- life ---

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link to {self.endpoint.replica_id}")

    def retire(self, is_retired: bool) -> None:
        """A retired link is not dialled again once it is lost."""
        self._is_retired = is_retired

    @property
    def has_ended(self) -> bool:
        """It will not dial again."""
        return self._task is not None and self._task.done()

    async def stop(self) -> None:
        """Hangs up: what runs there through this link is aborted by the replica."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # --- messages down ---

    def submit(self, action: SendSubmit) -> None:
        self._outbox.put_nowait(submit_message(action))

    def abort(self, action: SendAbort) -> None:
        self._outbox.put_nowait(abort_message(action))

    # --- sessions ---

    async def _run(self) -> None:
        while not self._is_retired:
            await self._session()
            if _is_cancelled():  # the call may have failed in the same moment, and gRPC then tells of that alone
                return
            await asyncio.sleep(self._backoff.pause_s(random.random()))

    async def _session(self) -> None:
        """Dials once, and listens until the link is lost."""
        error: HoldfastError = self._lost("it was let go")
        try:
            await self._talk()
        except grpc.aio.AioRpcError as lost:
            error = self._lost(f"{lost.code().name}: {lost.details()}")
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            error = self._lost("the call was cut off" if self._frozen_s is None else self._frozen())
        except ReplicaError as refused:
            error = refused
        except Exception as bug:
            logger.exception("the link to replica %s failed by a fault of ours", self.endpoint.replica_id)
            error = InternalError(f"the link to replica {self.endpoint.replica_id} failed: {type(bug).__name__}")
        finally:
            was_up, self.is_up = self.is_up, False
            if was_up:
                self._listener.replica_down(self.endpoint.replica_id, error)
        logger.log(logging.DEBUG if self._backoff.num_failed else logging.WARNING, "%s", error)
        if not was_up:
            self._backoff.note_failure()

    async def _talk(self) -> NoReturn:
        """One session. Ends by raising: `ReplicaError`, or what gRPC raises."""
        self._outbox = asyncio.Queue()
        self._frozen_s = None
        if self._config.routing_policy == "prefix_aware":
            self._outbox.put_nowait(follow_cache_message())
        async with grpc.aio.insecure_channel(self.endpoint.address, options=_channel_options(self._config)) as channel:
            call: LinkCall = engine_pb2_grpc.EngineStub(channel).Link()  # type: ignore[no-untyped-call]
            tasks = [asyncio.create_task(_write(self._outbox, call))]
            messages = aiter(call)
            try:
                hello = await self._greet(messages)
                watch = LinkWatch(self._is_busy, hello.frozen_after_ms / 1000, asyncio.get_running_loop().time)
                if hello.heartbeat_ms:
                    tasks.append(asyncio.create_task(self._end_when_frozen(watch, call)))
                async for message in messages:
                    self._take(message, watch)
                raise self._lost("it hung up")
            finally:
                for task in tasks:
                    task.cancel()

    def _take(self, message: engine_pb2.LinkResponse, watch: LinkWatch) -> None:
        if message.HasField("heartbeat"):
            watch.note_heartbeat(message.heartbeat.progress, message.heartbeat.expected_step_s)
            return
        watch.note_step()
        self._listener.replica_news(self.endpoint.replica_id, step_news(message.step))

    async def _end_when_frozen(self, watch: LinkWatch, call: LinkCall) -> None:
        """Cuts the call off, so that what runs there is carried on elsewhere, and nothing late comes from there."""
        self._frozen_s = await watch.until_frozen()
        call.cancel()

    def _is_busy(self) -> bool:
        return self._listener.is_busy(self.endpoint.replica_id)

    def _frozen(self) -> str:
        return f"it is frozen: no progress for {self._frozen_s:.1f} s while it has work"

    async def _greet(self, messages: AsyncIterator[engine_pb2.LinkResponse]) -> engine_pb2.Hello:
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                first = await anext(messages, None)
        except TimeoutError:
            raise self._lost(f"no hello within {self._config.connect_timeout_s:g} s") from None
        if first is None:
            raise self._lost("it hung up before its hello")
        facts = self._checked(first)
        await self._listener.prepare(self.endpoint)
        self.is_up = True
        self._backoff.note_up()
        self._listener.replica_up(self, facts, engine_load(first.hello.load))
        logger.info("replica %s of model %s is up at %s", facts.replica_id, facts.model, self.endpoint.address)
        return first.hello

    def _checked(self, message: engine_pb2.LinkResponse) -> ReplicaFacts:
        """Who answers may be another replica that has got the port; it must not be taken for the one we dialled."""
        facts = replica_facts(message.hello)
        found, wanted = (facts.replica_id, facts.model), (self.endpoint.replica_id, self.endpoint.model)
        if found != wanted:
            raise ReplicaError(f"{self.endpoint.address} is replica {found[0]!r} of {found[1]!r}, not {wanted[0]!r}")
        return facts

    def _lost(self, reason: str) -> ReplicaError:
        return ReplicaError(f"replica {self.endpoint.replica_id} was lost ({reason})")


async def _write(outbox: asyncio.Queue[engine_pb2.LinkRequest], call: LinkCall) -> None:
    """Sends what is dropped in, in order. When that fails, the call is over, and the reader says why."""
    try:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await outbox.get())
    finally:
        call.cancel()


def _is_cancelled() -> bool:
    """Whether somebody cancelled this task, as opposed to the call that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _channel_options(config: RouterConfig) -> list[tuple[str, int]]:
    """A ping after a short silence finds a peer that has gone without a word, as when a node loses its network.

    Newer gRPC waits `ping_timeout_ms` for the answer (a minute, if unset), older gRPC `keepalive_timeout_ms`.
    """
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", round(config.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(config.keepalive_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", round(config.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Each session dials for itself; a pool shared by the process would impose its own, longer pauses.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
    ]

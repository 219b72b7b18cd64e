"""Router's end of the link to one replica: a gRPC stream that reconnects when it is lost. However a session ends, the
dispatch host gets exactly one `replica_down` for it.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NoReturn, TypeAlias

import grpc
from google.protobuf.message import Message

from holdfast.router.config import RouterConfig
from holdfast.router.dispatch.circuit_breaker import Backoff
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.events import SendAbort, SendAhead, SendSubmit, SendTakePins
from holdfast.router.links.replica_directory import ReplicaEndpoint
from holdfast.v1 import engine_pb2, engine_pb2_grpc
from holdfast.worker.adapter import Adapter
from holdfast.worker.errors import HoldfastError, InternalError, ReplicaError
from holdfast.worker.log_level import LogLevel
from holdfast.worker.model_info import ReplicaFacts
from holdfast.worker.progress import FrozenVerdict
from holdfast.worker.step_update import Heartbeat, Hello, StepUpdate
from holdfast.worker.wire.link_requests import (
    abort_message,
    fetch_ahead_message,
    follow_cache_message,
    keep_adapters_message,
    kill_message,
    set_log_level_message,
    submit_message,
    take_pins_message,
)
from holdfast.worker.wire.link_responses import (
    LinkMessageError,
    read_response,
)
from holdfast.worker.wire.link_security import UNSECURED, LinkSecurity
from holdfast.worker.wire.loopback import NO_PROXY

LOOK_EVERY_S: Final = 0.1

ASK_S: Final = 5.0
"""Seconds to wait for a replica's answer: a step of its may have to end first."""

NUM_HEARTBEATS_MISSED: Final = 8
"""A replica with work that misses this many heartbeats is frozen, however long its steps: heartbeats do not wait for
steps. The allowance for long steps holds only while heartbeats arrive."""


class LinkWatch:
    """Watches one session of one link. The link reports every message to it."""

    def __init__(
        self, has_work: Callable[[], bool], frozen_after_s: float, heartbeat_s: float, clock: Callable[[], float]
    ) -> None:
        """`heartbeat_s` is the time between two heartbeats of the replica."""
        self._has_work = has_work
        self._progress = FrozenVerdict(frozen_after_s)
        self._silence = FrozenVerdict(max(frozen_after_s, NUM_HEARTBEATS_MISSED * heartbeat_s))
        self._clock = clock
        self._work_came = asyncio.Event()
        self._count = 0
        self._num_messages = 0
        self._last_heartbeat = Heartbeat(progress=0, expected_gap_s=0.0)

    def note_work(self) -> None:
        """A request was sent to the replica."""
        self._work_came.set()

    def note_step(self) -> None:
        """A step update arrived."""
        self._count += 1
        self._num_messages += 1

    def note_heartbeat(self, heartbeat: Heartbeat) -> None:
        """A heartbeat arrived. It is progress if the replica's own counter has moved."""
        self._count += heartbeat.progress != self._last_heartbeat.progress
        self._num_messages += 1
        self._last_heartbeat = heartbeat

    def look(self) -> bool:
        """Whether the replica is frozen now. To be called regularly."""
        has_work, now = self._has_work(), self._clock()
        is_silent = self._silence.look(self._num_messages, has_work=has_work, expected_gap_s=0.0, now=now)
        last = self._last_heartbeat
        stands_still = self._progress.look(
            self._count, has_work=has_work, expected_gap_s=last.expected_gap_s, now=now, starved_s=last.starved_s
        )
        return is_silent or stands_still

    async def until_frozen(self) -> float:
        """Waits until the replica is frozen. Returns the seconds without progress. Looks only while there is work."""
        while not self.look():
            self._work_came.clear()
            if not self._has_work():
                await self._work_came.wait()
            await asyncio.sleep(LOOK_EVERY_S)
        return self._progress.still_s


logger = logging.getLogger(__name__)

LinkCall: TypeAlias = "grpc.aio.StreamStreamCall[engine_pb2.LinkRequest, engine_pb2.LinkResponse]"

MAX_MESSAGE_BYTES: Final = 64 * 2**20

_HUNG_UP: Final = engine_pb2.LinkResponse()
"""Stands for the end of a replica's stream."""


Prepare: TypeAlias = Callable[[ReplicaEndpoint, ReplicaFacts], Awaitable[None]]
"""Prepares for a replica that has said hello. If this raises, the replica is not up, and is dialled again."""


class ReplicaLink:
    """The link to one replica, which redials until it is stopped or retired. A `ReplicaPort` while it is up.

    It calls `replica_down` of the dispatch host once after each `replica_up`, and sends updates only in between.
    """

    def __init__(
        self,
        endpoint: ReplicaEndpoint,
        dispatch_host: DispatchHost,
        prepare: Prepare,
        config: RouterConfig,
        security: LinkSecurity = UNSECURED,
        pinned: Callable[[], tuple[Adapter, ...]] = tuple,
    ) -> None:
        self._security = security
        self._pinned = pinned
        self._kept: tuple[Adapter, ...] | None = None
        """Adapters that the replica was told to keep in this session; None: it is not up, or serves none."""
        self.endpoint = endpoint
        self._dispatch_host = dispatch_host
        self._prepare = prepare
        self._config = config
        self._outbox: asyncio.Queue[engine_pb2.LinkRequest] = asyncio.Queue()
        self.is_up = False
        self.block_size = 0
        """Tokens in a block of the replica, once it was up."""
        self._stub: Any = None
        self._is_retired = False
        self._log_level: LogLevel | None = None
        self._watch: LinkWatch | None = None
        self._frozen_s: float | None = None
        """Seconds without progress after which this session was cut off; None if it was not."""
        self._backoff = Backoff(max_pause_s=config.max_reconnect_s)
        self._task: asyncio.Task[None] | None = None

    # --- life ---

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link to {self.endpoint.replica_id}")

    def retire(self, is_retired: bool) -> None:
        """A retired link is not dialled again once it is lost. Its replica gets no new requests."""
        self._is_retired = is_retired
        self._dispatch_host.replica_retiring(self.endpoint.replica_id, is_retired)

    def set_log_level(self, level: LogLevel | None) -> None:
        """Sets the replica's log level, in this session and later ones; None: as it was started."""
        if level is not None and level != self._log_level:
            self._outbox.put_nowait(set_log_level_message(level))
        self._log_level = level

    def keep_adapters(self) -> None:
        """Tells a replica that is up which adapters stay resident, where that has changed. In a new session it is told
        anyway.
        """
        if self._kept is not None and (pinned := self._pinned()) != self._kept:
            self._outbox.put_nowait(keep_adapters_message(pinned))
            self._kept = pinned

    @property
    def has_ended(self) -> bool:
        """Whether it will not dial again."""
        return self._task is not None and self._task.done()

    async def stop(self) -> None:
        """Closes the link: the replica aborts all requests of this link."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # --- messages to the replica ---

    def submit(self, action: SendSubmit) -> None:
        """Sends a request's attempt to the replica."""
        if self._watch is not None:
            self._watch.note_work()
        self._outbox.put_nowait(submit_message(action.attempt, action.request))

    def abort(self, action: SendAbort) -> None:
        self._outbox.put_nowait(abort_message(action.attempt))

    def take_pins(self, action: SendTakePins) -> None:
        self._outbox.put_nowait(take_pins_message(action.address))

    def fetch_ahead(self, action: SendAhead) -> None:
        self._outbox.put_nowait(fetch_ahead_message(action.attempt, action.request))

    def kill(self) -> None:
        """The replica's process is to end at once, if it was started with that allowed."""
        self._outbox.put_nowait(kill_message())

    async def ask(self, method: str, request: Message) -> Any:
        """Answer of the replica to a unary method of `holdfast.v1.Engine`. Raises `ReplicaError`: there is none."""
        if not self.is_up:
            raise ReplicaError(f"replica {self.endpoint.replica_id} is not connected")
        try:
            return await getattr(self._stub, method)(request, timeout=ASK_S, metadata=self._security.metadata())
        except grpc.aio.AioRpcError as error:
            raise ReplicaError(f"replica {self.endpoint.replica_id}: {error.code().name}: {error.details()}") from error

    # --- sessions ---

    async def _run(self) -> None:
        while not self._is_retired:
            await self._session()
            if _is_cancelled():  # if the call failed at the same time, gRPC raises only that failure
                return
            await asyncio.sleep(self._backoff.pause_s(random.random()))

    async def _session(self) -> None:
        """Dials once, and listens until the link is lost."""
        error: HoldfastError = self._lost("the router has closed the link")
        began_s = asyncio.get_running_loop().time()
        is_fault = False
        try:
            await self._talk()
        except grpc.aio.AioRpcError as lost:
            error = self._lost(f"{lost.code().name}: {lost.details()}")
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            error = self._lost("the call was cut off" if self._frozen_s is None else self._frozen())
        except LinkMessageError as garbage:
            error, is_fault = self._lost(f"its message cannot be parsed: {garbage}"), True
        except ReplicaError as refused:
            error = refused
        except Exception as bug:
            logger.exception("%s failed: internal error", self._name)
            error, is_fault = InternalError(f"{self._name} failed: {type(bug).__name__}"), True
        finally:
            was_up, self.is_up = self.is_up, False
            is_fault |= was_up and not self._tell_down(error)
        logger.log(logging.DEBUG if self._backoff.num_failed else logging.WARNING, "%s", error)
        if not was_up:
            self._backoff.note_failure()
        elif is_fault:
            self._backoff.note_fault(asyncio.get_running_loop().time() - began_s)

    def _tell_down(self, error: HoldfastError) -> bool:
        """False if the dispatch host raised. That must not keep the link from being dialled again."""
        try:
            self._dispatch_host.replica_down(self.endpoint.replica_id, error)
        except Exception:  # whatever it is, the link is dialled again
            logger.exception("handling the loss of %s failed: internal error", self._name)
            return False
        return True

    async def _talk(self) -> NoReturn:
        """Runs one session. It always ends by raising: `ReplicaError`, `LinkMessageError`, or what gRPC raises."""
        self._outbox = asyncio.Queue()
        self._frozen_s = self._kept = None
        if self._config.is_prefix_aware:
            self._outbox.put_nowait(follow_cache_message())
        if self._log_level is not None:
            self._outbox.put_nowait(set_log_level_message(self._log_level))
        async with self._security.channel(self.endpoint.address, _channel_options(self._config)) as channel:
            self._stub = engine_pb2_grpc.EngineStub(channel)  # type: ignore[no-untyped-call]
            call: LinkCall = self._stub.Link(metadata=self._security.metadata())
            tasks = [asyncio.create_task(_write(self._outbox, call))]
            messages = aiter(call)
            try:
                hello = await self._greet(messages)
                if hello.facts.max_loras:
                    self._kept = self._pinned()
                    self._outbox.put_nowait(keep_adapters_message(self._kept))
                clock = asyncio.get_running_loop().time
                watch = self._watch = LinkWatch(self._is_busy, hello.frozen_after_s, hello.heartbeat_s, clock)
                if hello.heartbeat_s:
                    tasks.append(asyncio.create_task(self._end_when_frozen(watch, call)))
                async for message in messages:
                    self._take(read_response(message), watch)
                raise self._lost("it hung up")
            finally:
                for task in tasks:
                    task.cancel()

    def _take(self, message: Hello | StepUpdate | Heartbeat, watch: LinkWatch) -> None:
        match message:
            case StepUpdate():
                watch.note_step()
                self._dispatch_host.replica_update(self.endpoint.replica_id, message)
            case Heartbeat():
                watch.note_heartbeat(message)
            case Hello():
                raise LinkMessageError("a second hello")

    async def _end_when_frozen(self, watch: LinkWatch, call: LinkCall) -> None:
        """Cancels the call when the replica is frozen: its requests then move elsewhere, and late output cannot arrive.

        The call is cancelled even if the watch fails, because nothing else would detect a frozen replica.
        """
        try:
            self._frozen_s = await watch.until_frozen()
        finally:
            call.cancel()

    def _is_busy(self) -> bool:
        return self._dispatch_host.dispatch.is_busy(self.endpoint.replica_id)

    def _frozen(self) -> str:
        return f"it is frozen: no progress for {self._frozen_s:.1f} s while it has work"

    async def _greet(self, messages: AsyncIterator[engine_pb2.LinkResponse]) -> Hello:
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                first = await anext(messages, _HUNG_UP)
        except TimeoutError:
            raise self._lost(f"no hello within {self._config.connect_timeout_s:g} s") from None
        if first is _HUNG_UP:
            raise self._lost("it hung up before its hello")
        hello = read_response(first)
        if not isinstance(hello, Hello):
            raise self._lost("the first message must be Hello")
        facts = replace(self._checked(hello), address=self.endpoint.address)
        await self._prepare(self.endpoint, facts)
        self.block_size = facts.block_size
        self.is_up = True
        self._backoff.note_up()
        self._dispatch_host.replica_up(self, facts, hello.load)
        logger.info("replica %s of model %s is up at %s", facts.replica_id, facts.model, self.endpoint.address)
        return hello

    def _checked(self, hello: Hello) -> ReplicaFacts:
        """Checks that the dialled replica has answered: another one may have got its port."""
        facts = hello.facts
        found, wanted = (facts.replica_id, facts.model), (self.endpoint.replica_id, self.endpoint.model)
        if found != wanted:
            raise ReplicaError(f"{self.endpoint.address} is replica {found[0]!r} of {found[1]!r}, not {wanted[0]!r}")
        return facts

    @property
    def _name(self) -> str:
        return f"the link to replica {self.endpoint.replica_id}"

    def _lost(self, reason: str) -> ReplicaError:
        return ReplicaError(f"replica {self.endpoint.replica_id} was lost ({reason})")


async def _write(outbox: asyncio.Queue[engine_pb2.LinkRequest], call: LinkCall) -> None:
    """Sends queued messages in order. When a write fails, the call is over, and its reader gets the error."""
    try:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await outbox.get())
    finally:
        call.cancel()


def _is_cancelled() -> bool:
    """Whether this task was cancelled, as opposed to the call that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _channel_options(config: RouterConfig) -> list[tuple[str, int]]:
    """Keepalive pings detect a peer that is gone without closing the connection, as when a node loses its network.

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
        NO_PROXY,
    ]

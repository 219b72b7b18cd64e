"""Relay of one request through the front: to a router, to another one when that is lost, and the answer to the client.

`HeldCall` decides which submission is sent and which bytes the client gets, as in `HoldingTransport`.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Final

from starlette.types import Scope, Send

from holdfast.cluster.client.resumable_call import Failed, HeldCall, error_event
from holdfast.cluster.client.retry_policy import RetryPolicy
from holdfast.cluster.front.upstream import (
    HOP_BY_HOP_HEADERS,
    OURS,
    ClientRequest,
    Connection,
    FrontStats,
    Head,
    RelaySettings,
    RouterLostError,
    Routers,
    Upstream,
)
from holdfast.router.api.http.server import CONNECTION
from holdfast.router.api.http.server import Connection as ClientConnection
from holdfast.router.wire.resume_codec import HOLD

KEEP_ALIVE_S: Final = 10.0
"""Seconds between comments in a stream without events, so that no proxy closes it."""

SILENCE_S: Final = 25.0
"""A router that says nothing in a stream for so long is lost."""

DOWN_S: Final = 1.0
"""A router that was lost is asked after all others for so long."""

MAX_WHOLE_BYTES: Final = 4 * 2**20
"""Most bytes of a non-streamed answer that is buffered, so that the request can be repeated if the router is lost; a
longer answer is passed on as it arrives."""

_COMMENT: Final = b": waiting\n\n"


class CutOffError(Exception):
    """Half of an answer is out, and the rest is lost: its client has to see that it was cut off."""


class Relay:
    """One request. `run` answers it, whatever happens, unless its client has gone."""

    def __init__(
        self,
        asked: ClientRequest,
        routers: Routers,
        stats: FrontStats,
        settings: RelaySettings,
        scope: Scope,
        send: Send,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._asked = asked
        self._routers = routers
        self._stats = stats
        self._send = send
        self._scope = scope
        self._loop = asyncio.get_running_loop()
        policy = RetryPolicy(
            num_routers=len(routers.all),
            connect_s=settings.connect_s,
            reconnect_s=settings.reconnect_s,
            timeout_s=None,
            draw=draw,
            now=self._loop.time(),
            sees_admission=False,
        )
        self._call = HeldCall(asked.body, policy, self._loop.time())
        self._router: Upstream | None = None
        """The router that has the request now."""
        self._connection: Connection | None = None
        self._has_begun = False
        self._num_written = 0
        self._wrote_at = self._loop.time()

    async def run(self) -> None:
        try:
            await self._run()
        finally:
            self._leave()

    def _go_to(self, router: Upstream) -> None:
        self._router = router
        router.num_open += 1

    def _leave(self, *, is_lost: bool = False) -> None:
        """The router has finished with the request."""
        if self._router is not None:
            self._router.num_open -= 1
            if is_lost:
                self._router.is_down_until_s = self._loop.time() + DOWN_S
        if self._connection is not None:
            self._connection.release()
        self._router = self._connection = None

    async def _run(self) -> None:
        call = self._call
        while True:
            answered = await self._answered()
            if answered is None:
                return
            head, connection = answered
            if call.record is None or head.status != 200:
                body = await self._whole(head, connection)
                if body is not None:
                    await self._answer(head, body)
                    return
                if not await self._may_retry(None):
                    return
                continue
            if not self._has_begun:
                await self._begin(head)
            if await self._streamed(connection):
                return

    # --- asking ---

    async def _answered(self) -> tuple[Head, Connection] | None:
        """The head of the next response that is worth having, and its connection. None: its client was answered."""
        while True:
            router = self._routers.choose(self._loop.time())
            added, body = ({}, self._asked.body) if self._passes else self._call.submission(self._loop.time())
            self._go_to(router)
            try:
                connection = self._connection = await router.connection()
                head = await connection.exchange(
                    self._asked.bytes_of(added, body), is_head=self._asked.method == b"HEAD"
                )
            except RouterLostError as lost:
                self._leave(is_lost=True)
                if not await self._may_ask_again(lost):
                    return None
                continue
            if self._passes:
                return head, connection
            verdict = self._call.verdict(head.status, head.get(HOLD.encode()), head.get(b"x-should-retry"))
            if verdict != "again":
                return head, connection
            self._leave(is_lost=True)  # others first
            hint = head.get(b"retry-after") or ""
            if not await self._may_retry(float(hint) if hint.isascii() and hint.isdecimal() else None):
                return None

    @property
    def _passes(self) -> bool:
        """Whether the request is passed on unchanged and never resent."""
        return self._asked.holds_itself or self._asked.is_sent_once

    async def _may_ask_again(self, lost: RouterLostError) -> bool:
        """After a router was lost before its response; False: its client was answered."""
        if lost.was_sent:
            self._stats.num_routers_lost += 1
            if self._passes:
                await self._give_up(502, b"the router was lost")
                return False
            self._call.note_lost(self._loop.time(), was_sent=True)
        return await self._may_retry(None)

    async def _may_retry(self, hint_s: float | None) -> bool:
        """Waits until the request may be sent again; False: it may not, and its client has got the error."""
        if (pause_s := self._call.pause_s(self._loop.time(), hint_s)) is None:
            await self._give_up(503, b"no router answers")
            return False
        if self._call.record is None:
            self._stats.num_repeated += 1
        await asyncio.sleep(pause_s)
        if self._has_begun and self._loop.time() - self._wrote_at > KEEP_ALIVE_S:
            await self._write(_COMMENT)
        return True

    # --- answers in one piece ---

    async def _whole(self, head: Head, connection: Connection) -> bytes | None:
        """The body, if it is short enough to be kept; a longer one is handed on, and empty here. None: it was lost."""
        parts: list[bytes] = []
        size, news = 0, asyncio.Event()

        def take(data: bytes) -> None:
            nonlocal size
            parts.append(data)
            size += len(data)
            if size > MAX_WHOLE_BYTES:
                connection.pause()
                news.set()

        connection.deliver(take, news.set)
        while True:
            await news.wait()
            news.clear()
            if size > MAX_WHOLE_BYTES:
                if not self._has_begun:
                    await self._begin(head)
                body = b"".join(parts)
                parts.clear()
                size = 0
                await self._write(body)
                connection.go_on()
            if connection.is_over:
                self._leave()
                return b"".join(parts)
            if connection.is_lost:
                self._stats.num_routers_lost += 1
                self._leave(is_lost=True)
                if self._has_begun or self._passes:
                    raise CutOffError
                return None

    async def _answer(self, head: Head, body: bytes) -> None:
        """An answer that is complete here."""
        if self._call.record is not None and self._has_begun:  # an error, where a stream was to go on
            await self._write(error_event(body))
        elif self._has_begun:
            await self._write(body)
        else:
            await self._begin(head, len(body))
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
            return
        await self._end()

    # --- streams ---

    async def _streamed(self, connection: Connection) -> bool:
        """Passes on the events of one router. True: the client's stream is complete; False: another router continues
        it.
        """
        news, waiting, call = asyncio.Event(), list[bytes](), self._call
        straight: ClientConnection | None = self._scope.get(CONNECTION)

        def take(data: bytes) -> None:
            events = call.push(data)
            if call.failed is not None:
                news.set()
            if not events:
                return
            if not waiting and straight is not None and straight.takes_chunks():
                straight.write_chunk(events)
            else:
                waiting.append(events)
                connection.pause()
                news.set()
            self._num_written += 1

        connection.deliver(take, news.set)
        while True:
            await self._news(news, connection)
            while waiting:
                events = b"".join(waiting)
                waiting.clear()
                await self._write(events)
                connection.go_on()
            if call.is_over:
                if connection.is_over or connection.is_lost:
                    self._leave()
                    await self._end()
                    return True
                continue  # the end of the response: its connection is good for another
            if (failed := call.failed) is not None:
                return await self._failed(failed)
            if connection.is_lost or connection.is_over:
                self._leave(is_lost=True)
                self._stats.num_routers_lost += 1
                if not await self._may_retry(None):
                    return True
                self._stats.num_resumed += 1
                return False

    async def _failed(self, failed: Failed) -> bool:
        """The router has ended the stream with an error. True: its client gets that."""
        self._leave(is_lost=True)
        if failed.may_retry and (pause_s := self._call.pause_s(self._loop.time(), failed.retry_after_s)) is not None:
            self._stats.num_resumed += 1
            await asyncio.sleep(pause_s)
            return False
        await self._write(failed.events)
        await self._end()
        return True

    async def _news(self, news: asyncio.Event, connection: Connection) -> None:
        """Waits for some. A router without a word for too long is lost; a client without one gets a comment."""
        while not news.is_set():
            num_written = self._num_written
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await news.wait()
            except TimeoutError:
                if self._loop.time() - connection.last_heard_s > SILENCE_S:
                    connection.close()
                    return
                if num_written == self._num_written:
                    await self._write(_COMMENT)
        news.clear()

    # --- to the client ---

    async def _begin(self, head: Head, size: int | None = None) -> None:
        self._has_begun = True
        headers = [pair for pair in head.headers if pair[0] not in HOP_BY_HOP_HEADERS and pair[0] != b"date"]
        if not self._asked.holds_itself:
            headers = [pair for pair in headers if pair[0] not in OURS]
        if size is not None:
            given = head.get(b"content-length") if self._asked.method == b"HEAD" else None
            headers.append((b"content-length", given.encode() if given else b"%d" % size))
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})

    async def _write(self, data: bytes) -> None:
        self._num_written += 1
        self._wrote_at = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _give_up(self, status: int, message: bytes) -> None:
        """There is no answer to be had."""
        self._stats.num_given_up += 1
        said = b'{"error": {"message": "%b", "type": "server_error", "param": null, "code": "no_router"}}' % message
        if self._has_begun:
            await self._write(error_event(said))
            await self._end()
            return
        headers = [(b"content-type", b"application/json"), (b"x-should-retry", b"true" if status == 503 else b"false")]
        await self._begin(Head(status, headers), len(said))
        await self._send({"type": "http.response.body", "body": said, "more_body": False})

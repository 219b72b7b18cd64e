"""Blocking client, for programs without asyncio: an `AsyncClient` on an event loop in a thread of its own.

What may live here: which streams are iterated over. What may not: what becomes of a request (`async_client.py`), the
thread and its loop (`cluster/loop_thread.py`).
"""

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

from holdfast.cluster.call_options import CallOptions
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.client.handover import Handover
from holdfast.cluster.client.retry_policy import RECONNECT_S
from holdfast.cluster.loop_thread import LoopThread
from holdfast.router.chat import Message
from holdfast.router.generation import Chunk, Generation
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.security.tls import Tls


class Client:
    """As `AsyncClient`, blocking. Use it as a context manager, from any number of threads."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        connect_s: float = 5.0,
        reconnect_s: float = RECONNECT_S,
        api_key: str = "",
        tls: Tls | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """As `AsyncClient.__init__`."""
        self._thread = LoopThread("holdfast client", _closed)
        self._gate = threading.Lock()
        self._is_closed = False
        self._open: set[Handover[Chunk]] = set()
        """Streams that are iterated over. Empty for good once the client is closed."""
        try:
            options = {"connect_s": connect_s, "reconnect_s": reconnect_s, "api_key": api_key, "tls": tls, "draw": draw}
            self._client = self._thread.run(_made(address, options))
        except BaseException:
            self._thread.close()
            raise

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections, and what has not ended: whoever still waits for some of it, on any thread, gets a
        RuntimeError. Safe to call twice.
        """
        with self._gate:
            self._is_closed = True
            open_streams, self._open = self._open, set()
        self._thread.close(self._end(open_streams))

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = "",
        request_id: str = "",
        **options: Unpack[CallOptions],
    ) -> Iterator[Chunk]:
        """The completions as they come, as `AsyncClient.stream`. Leaving the iteration aborts the request."""
        chunks = self._client.stream(
            prompt,
            params,
            messages=messages,
            model=model,
            request_id=request_id,
            **options,
        )
        handover = Handover(chunks, self._thread.loop)
        with self._gate:
            if self._is_closed:
                raise _closed()
            self._open.add(handover)
        try:
            yield from handover
        finally:
            with self._gate:
                is_open = handover in self._open
                self._open.discard(handover)
            if is_open:
                self._thread.run(handover.end())

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = "",
        request_id: str = "",
        **options: Unpack[CallOptions],
    ) -> Generation:
        """All completions, when they have ended, as `AsyncClient.generate`."""
        answer = self._client.generate(
            prompt,
            params,
            messages=messages,
            model=model,
            request_id=request_id,
            **options,
        )
        return self._thread.run(answer)

    def abort(self, request_id: str) -> bool:
        """As `AsyncClient.abort`."""
        return self._thread.run(self._client.abort(request_id))

    # --- inside ---

    async def _end(self, open_streams: set[Handover[Chunk]]) -> None:
        for handover in open_streams:
            await handover.end()
        await self._client.close()


def _closed() -> RuntimeError:
    return RuntimeError("the client is closed")


async def _made(address: str | Sequence[str], options: Mapping[str, Any]) -> AsyncClient:
    """Made on the loop: gRPC channels belong to the loop that they are made on."""
    return AsyncClient(address, **options)

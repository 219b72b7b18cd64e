"""Blocking client, for programs without asyncio: an `AsyncClient` on an event loop in a thread of its own.

What may live here: the thread and its loop. What may not: what becomes of a request (`async_client.py`).
"""

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from holdfast.cluster.call_options import CallOptions
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.client.handover import Handover
from holdfast.cluster.client.retry_policy import RECONNECT_S
from holdfast.router.chat import Message
from holdfast.router.generation import Chunk, Generation
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.security.tls import Tls

ResultT = TypeVar("ResultT")


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
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="holdfast client", daemon=True)
        self._thread.start()
        self._open: set[Handover[Chunk]] = set()
        """Streams that are iterated over."""
        try:
            options = {"connect_s": connect_s, "reconnect_s": reconnect_s, "api_key": api_key, "tls": tls, "draw": draw}
            self._client = self._wait(_made(address, options))
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections, and streams that have not ended: whoever still iterates over one gets an error."""
        if self._thread.is_alive():
            while self._open:
                self._wait(self._open.pop().end())
            self._wait(self._client.close())
            self._stop()

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
        handover = Handover(chunks, self._loop)
        self._open.add(handover)
        try:
            yield from handover
        finally:
            if handover in self._open:
                self._open.remove(handover)
                self._wait(handover.end())

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
        return self._wait(answer)

    def abort(self, request_id: str) -> bool:
        """As `AsyncClient.abort`."""
        return self._wait(self._client.abort(request_id))

    # --- inside ---

    def _wait(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _made(address: str | Sequence[str], options: Mapping[str, Any]) -> AsyncClient:
    """Made on the loop: gRPC channels belong to the loop that they are made on."""
    return AsyncClient(address, **options)

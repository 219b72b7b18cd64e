"""Blocking client, for programs without asyncio: an `AsyncClient` on an event loop in a separate thread."""

import asyncio
import queue
import random
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, Literal, TypeVar, Unpack

from holdfast.cluster.call_options import CallOptions, ServiceOptions
from holdfast.cluster.client.async_client import AsyncClient
from holdfast.cluster.client.retry_policy import RECONNECT_S
from holdfast.cluster.loop_thread import LoopThread
from holdfast.router.chat import Message
from holdfast.router.generation import Generation, OutputDelta
from holdfast.router.wire.pooling_codec import PooledOutputs
from holdfast.worker.pooling import PoolingParams
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.wire.tls import Tls

MAX_AHEAD: Final = 64
"""Most deltas that are read ahead. Then the stream waits for its reader."""

RESUMES_READING_AT: Final = MAX_AHEAD // 2  # items

ItemT = TypeVar("ItemT")


class Handover(Generic[ItemT]):
    """Reads `items` on `loop` from the first `__next__` on, and raises their errors there.

    It ends on the loop, by `end`. It has no `close`, which `yield from` would call on the other thread.
    """

    def __init__(self, items: AsyncGenerator[ItemT, None], loop: asyncio.AbstractEventLoop) -> None:
        self._items = items
        self._loop = loop
        self._queue = queue.SimpleQueue[ItemT | _End]()
        self._is_full = False
        self._has_room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._has_begun = False
        self._is_over = False
        """The call was ended from outside. Used on the loop's thread only."""

    # --- on the thread that iterates ---

    def __iter__(self) -> Iterator[ItemT]:
        return self

    def __next__(self) -> ItemT:
        if not self._has_begun:
            self._has_begun = True
            self._loop.call_soon_threadsafe(self._begin)
        item = self._queue.get()
        if self._is_full and self._queue.qsize() <= RESUMES_READING_AT:
            self._is_full = False
            self._loop.call_soon_threadsafe(self._has_room.set)
        if isinstance(item, _End):
            self._queue.put(item)  # a caller that asks again gets it again
            raise item.error or StopIteration
        return item

    # --- on the loop ---

    async def end(self) -> None:
        """Ends the stream if it has not ended. Its reader gets the items that were read ahead, then an error."""
        self._has_begun = self._is_over = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        else:
            self._queue.put(_End(_closed_handover()))
        await self._items.aclose()

    def _begin(self) -> None:
        """Does nothing where the stream was ended between the first `__next__` and this."""
        if not self._is_over:
            self._task = self._loop.create_task(self._read())

    async def _read(self) -> None:
        error: BaseException | None = None
        try:
            async for item in self._items:
                self._queue.put(item)
                if self._queue.qsize() >= MAX_AHEAD:
                    await self._until_read()
        except asyncio.CancelledError:
            error = _closed_handover()
        except BaseException as failure:  # noqa: BLE001 - whatever it is, it is raised on the other thread
            error = failure
        self._queue.put(_End(error))

    async def _until_read(self) -> None:
        """The reader sets the event once it has read so much, unless that was before it could see `_is_full`."""
        self._has_room.clear()
        self._is_full = True
        while self._queue.qsize() > RESUMES_READING_AT:
            await self._has_room.wait()
            self._has_room.clear()
        self._is_full = False


def _closed_handover() -> RuntimeError:
    return RuntimeError("the client was closed while its stream was being read")


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Client:
    """Blocking version of `AsyncClient`. Use it as a context manager, from any number of threads."""

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
        """Same arguments as `AsyncClient.__init__`."""
        self._thread = LoopThread("holdfast client", _closed)
        self._gate = threading.Lock()
        self._is_closed = False
        self._open: set[Handover[OutputDelta]] = set()
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
        """Closes the connections and ends running calls: their callers, on any thread, get a RuntimeError. Safe to call
        twice.
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
    ) -> Iterator[OutputDelta]:
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

    def pool(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: PoolingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
        truncate_prompt_tokens: int | None = None,
        truncation_side: Literal["left", "right"] | None = None,
        **options: Unpack[ServiceOptions],
    ) -> PooledOutputs:
        """A vector, or scores by label, of each prompt, as `AsyncClient.pool`."""
        answer = self._client.pool(
            prompts,
            params,
            model=model,
            request_id=request_id,
            truncate_prompt_tokens=truncate_prompt_tokens,
            truncation_side=truncation_side,
            **options,
        )
        return self._thread.run(answer)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str = "",
        model: str = "",
        request_id: str = "",
        truncate_prompt_tokens: int | None = None,
        truncation_side: Literal["left", "right"] | None = None,
        **options: Unpack[ServiceOptions],
    ) -> list[float]:
        """A score for each document, as `AsyncClient.score`."""
        answer = self._client.score(
            queries,
            documents,
            instruction=instruction,
            model=model,
            request_id=request_id,
            truncate_prompt_tokens=truncate_prompt_tokens,
            truncation_side=truncation_side,
            **options,
        )
        return self._thread.run(answer)

    def abort(self, request_id: str) -> bool:
        """Same as `AsyncClient.abort`."""
        return self._thread.run(self._client.abort(request_id))

    # --- inside ---

    async def _end(self, open_streams: set[Handover[OutputDelta]]) -> None:
        for handover in open_streams:
            await handover.end()
        await self._client.close()


def _closed() -> RuntimeError:
    return RuntimeError("the client is closed")


async def _made(address: str | Sequence[str], options: Mapping[str, Any]) -> AsyncClient:
    """Made on the loop: gRPC channels belong to the loop that they are made on."""
    return AsyncClient(address, **options)

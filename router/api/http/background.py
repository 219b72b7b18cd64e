"""Background responses: computed whether their clients are there or not, and continued after any process has ended.

The job store keeps the client's part: the body, and the stream with its marks. The router that has
a job's lease computes it; after its end another one, or the same cluster started again, continues after the last mark,
as for a client that comes again. So the stream has the tokens, and the events, that it would have had.
"""

import asyncio
import contextvars
import json
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from holdfast.router.api.http.errors import http_error
from holdfast.router.api.http.submission import Submission
from holdfast.router.resume import Identity, ResumeRecord
from holdfast.router.store.job_store import Job, JobStore
from holdfast.router.store.response_store import StoredResponse
from holdfast.router.wire.resume_codec import MARK, StreamFailure, read_mark
from holdfast.router.wire.statuses import kind_of
from holdfast.worker.errors import HoldfastError, InternalError, RequestSupersededError, StoreError

logger = logging.getLogger(__name__)

MAX_RUNNING: Final = 64
"""Jobs of one router at a time; more wait in the store."""

STORE_EVERY_S: Final = 0.25
"""Seconds between writes of a stream: that much is computed again after a loss, with the same tokens."""

CLAIM_EVERY_S: Final = 1.0
_CLAIMED_AT_A_TIME: Final = 8  # jobs
_BEGIN: Final = b": stored events\n\n"
"""A comment: there may be no event at all."""
_NUMBER: Final = re.compile(rb'data: \{"type": "[^"]*", "sequence_number": (\d+)')

Save = Callable[[dict[str, Any]], Awaitable[None]]


class Prepare(Protocol):
    """Makes a request of a job: the response object before its first event, and the marked events of its stream.

    `save` gets the response object before the last event. Raises `HoldfastError`.
    """

    async def __call__(
        self, content: bytes, tenant: str, submission: Submission, save: Save
    ) -> tuple[dict[str, Any], AsyncGenerator[bytes, None]]: ...


@dataclass(slots=True)
class _Run:
    """One job, as it is computed here."""

    job: Job
    record: ResumeRecord
    """State in the store, or waiting to be stored."""
    waiting: list[bytes] = field(default_factory=list)
    begun: dict[str, Any] | None = None
    """The object while it is in progress."""
    is_announced: bool = False
    """The store says that it is in progress."""
    ended: dict[str, Any] | None = None
    storing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held until a piece that was taken is stored or back in `waiting`: pieces are stored whole and in order."""

    async def keep(self, response: dict[str, Any]) -> None:
        self.ended = response

    def add(self, events: bytes) -> None:
        _merge(self.record, events)
        self.waiting.append(events)

    def take(self) -> bytes:
        piece = b"".join(self.waiting)
        self.waiting.clear()
        return piece


class BackgroundResponses:
    """Background responses of one router."""

    def __init__(self, jobs: JobStore, prepare: Prepare, enter: Callable[[str, str], None]) -> None:
        """`enter` makes the running task one of this process's own, charged to a tenant and to the key of this name."""
        self._jobs = jobs
        self._prepare = prepare
        self._enter = enter
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._stored = asyncio.Event()
        self._is_stopping = False
        self._claiming = asyncio.create_task(self._claim(), name="background jobs")

    async def submit(self, job: Job, queued: StoredResponse) -> None:
        """Durably; it is begun here at once where there is room. Raises `StoreError`."""
        await self._jobs.submit(job, queued)
        if len(self._runs) < MAX_RUNNING and not self._is_stopping:
            self._start(job)
        else:
            await self._release(job)

    async def cancel(self, tenant: str, response_id: str) -> dict[str, Any]:
        """Same as `JobStore.cancel`. The router that computes it stops when it stores its next piece."""
        return await self._jobs.cancel(tenant, response_id)

    async def stream(self, tenant: str, response_id: str, after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events after number `after`, as they are stored, until the response is over or deleted. Raises
        `NotFoundError`.
        """
        num_read, is_over = 0, False
        yield _BEGIN
        while not is_over:
            stored = self._stored
            pieces, is_over = await self._jobs.pieces(tenant, response_id, num_read)
            num_read += len(pieces)
            if events := b"".join(_events_after(piece, after) for piece in pieces):
                yield events
            if not is_over:
                with suppress(TimeoutError):
                    async with asyncio.timeout(CLAIM_EVERY_S):
                        await stored.wait()

    async def stop(self) -> None:
        """Stops computing in this router; other routers continue the jobs."""
        self._is_stopping = True
        tasks = [self._claiming, *self._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    # --- inside ---

    async def _claim(self) -> None:
        while True:
            jobs: list[Job] = []
            try:
                if room := MAX_RUNNING - len(self._runs):
                    jobs = await self._jobs.claim(min(room, _CLAIMED_AT_A_TIME))
            except StoreError as error:
                logger.warning("background responses cannot be claimed: %s", error)
            except Exception:  # the next turn tries again
                logger.exception("background responses cannot be claimed: internal error")
            for job in jobs:
                self._start(job)
            if not jobs:
                await asyncio.sleep(CLAIM_EVERY_S)

    def _start(self, job: Job) -> None:
        context = contextvars.Context()  # belongs to no client: neither to its key nor to the counts of its connection
        name = f"{job.tenant}\0{job.id}"
        task = context.run(lambda: asyncio.create_task(self._run(job), name="background response"))
        self._runs[name] = task
        task.add_done_callback(lambda _: self._runs.pop(name, None))

    async def _run(self, job: Job) -> None:
        self._enter(job.tenant, job.key_name)
        identity = Identity.of(job.identity)
        assert identity is not None, "it is written as this is read"
        run, known = _Run(job, ResumeRecord(identity=identity)), ResumeRecord(identity=identity)
        try:
            for piece in job.pieces:
                _merge(run.record, piece)
                _merge(known, piece)
        except ValueError as gap:
            logger.error("a background response cannot be continued: its stored stream has a gap: %s", gap)
            await self._failed(run, InternalError(f"its stored stream has a gap: {gap}"))
            return
        submission = Submission(identity=identity, attempt=job.num_claims, record=known if job.pieces else None)
        job.pieces = []
        computing = asyncio.create_task(self._compute(run, submission))
        computing.add_done_callback(lambda task: task.cancelled() or task.exception())  # no client may ask for it
        try:
            is_mine = True
            while is_mine and not computing.done():
                await asyncio.wait([computing], timeout=STORE_EVERY_S)
                is_mine = await asyncio.shield(self._store(run))
            if not is_mine:
                return
            computing.result()
            while run.ended is not None and not await asyncio.shield(self._finished(run, run.ended)):
                await asyncio.sleep(CLAIM_EVERY_S)
        except asyncio.CancelledError:
            await asyncio.shield(self._left(run, computing))
            raise
        except HoldfastError as error:
            await self._failed(run, error)
        except Exception as bug:
            logger.exception("a background response failed: internal error")
            await self._failed(run, InternalError(f"the response failed: internal error ({type(bug).__name__})"))
        finally:
            computing.cancel()

    async def _compute(self, run: _Run, submission: Submission) -> None:
        run.begun, events = await self._prepare(run.job.content, run.job.tenant, submission, run.keep)
        async for some in events:
            run.add(some)

    async def _store(self, run: _Run) -> bool:
        """Whether the job is still this router's."""
        begun = None if run.is_announced or run.begun is None else {**run.begun, "status": "in_progress"}
        if run.ended is not None:
            return True  # with the end, all at once
        async with run.storing:
            piece = run.take()
            try:
                is_mine = await self._jobs.add(run.job, piece, begun)
            except StoreError as error:
                logger.warning("a background response cannot be stored yet: %s", error)
                run.waiting.insert(0, piece)
                return True
        run.is_announced = run.is_announced or begun is not None
        self._tell()
        return is_mine

    async def _finished(self, run: _Run, response: dict[str, Any]) -> bool:
        async with run.storing:
            piece = run.take()
            try:
                await self._jobs.finish(run.job, piece, response)
            except StoreError as error:
                logger.warning("a background response cannot be stored yet: %s", error)
                run.waiting.insert(0, piece)
                return False
        self._tell()
        return True

    async def _left(self, run: _Run, computing: "asyncio.Task[None]") -> None:
        """This router stops."""
        computing.cancel()
        await asyncio.wait([computing])
        async with run.storing:  # what was being stored when it was told to stop
            pass
        if run.ended is None and await self._store(run):
            await self._release(run.job)

    async def _release(self, job: Job) -> None:
        try:
            await self._jobs.release(job)
        except StoreError as error:  # its lease runs out
            logger.warning("a background response cannot be put back: %s", error)

    async def _failed(self, run: _Run, error: HoldfastError) -> None:
        """Ends a run with this error, or begins it again if that may help."""
        if isinstance(error, RequestSupersededError):
            return
        if kind_of(error).http.may_retry and not isinstance(error, StoreError):
            await self._store(run)
            await asyncio.sleep(0 if self._is_stopping else CLAIM_EVERY_S)
            await self._release(run.job)
            return
        answer = http_error(error)
        stored = run.begun or {"id": run.job.id, "object": "response", "background": True, "output": []}
        response = {**stored, "status": "failed", "error": {"code": answer.code, "message": answer.message}}
        event = {"type": "response.failed", "sequence_number": run.record.num_events, "response": response}
        run.waiting.append(b"event: response.failed\ndata: " + json.dumps(event).encode() + b"\n\n")
        while not await self._finished(run, response):
            await asyncio.sleep(CLAIM_EVERY_S)

    def _tell(self) -> None:
        """Readers look again."""
        self._stored.set()
        self._stored = asyncio.Event()


def _merge(record: ResumeRecord, events: bytes) -> None:
    """Adds the content of the marks among them."""
    for part in events.split(b"\n\n"):
        if part.startswith(MARK) and not isinstance(mark := read_mark(part[len(MARK) :]), StreamFailure):
            record.merge(mark)


def _events_after(piece: bytes, after: int) -> bytes:
    """Events of the piece with greater numbers, without marks."""
    kept = []
    for part in piece.split(b"\n\n"):
        found = _NUMBER.search(part)
        if found is not None and int(found[1]) > after:
            kept.append(part + b"\n\n")
    return b"".join(kept)

"""Lines of batches, as one router computes them: some at a time, at low priority, each sent to its endpoint.

A line is a job of the job store, and its request has the job's id and the batch's time. So a line that was under way
when its router ended is computed again with the tokens that it would have had; only one result of it is ever stored.
"""

import asyncio
import contextvars
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

from starlette.responses import Response

from holdfast.router.api.http.errors import http_error
from holdfast.router.api.http.event_stream import OPENAI
from holdfast.router.api.http.submission import Submission
from holdfast.router.resume import Identity
from holdfast.router.store.batch_store import BatchStore, result_line
from holdfast.router.store.job_store import LEASE_S, Job, JobStore
from holdfast.worker.errors import InternalError, StoreError

logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0
"""Seconds between looks for lines, renewals of leases, and ends of batches whose time is up."""

PURGE_EVERY_S: Final = 600.0
"""Seconds between deletions of expired objects, also where nothing is written."""

AGAIN_AFTER_S: Final = 1.0
"""A line that was refused for now is put back after so long."""

assert LOOK_EVERY_S < LEASE_S / 2


class Call(Protocol):
    """Sends a request of this process to one of its endpoints, charged to a tenant, and gets the whole answer."""

    def __call__(self, path: str, tenant: str, content: bytes, submission: Submission) -> Awaitable[Response]: ...


class BatchLines:
    """Lines of batches at one router."""

    def __init__(
        self, jobs: JobStore, batches: BatchStore, call: Call, enter: Callable[[str, str], None], concurrency: int
    ) -> None:
        """Computes at most `concurrency` lines at a time. `enter` makes the running task one of this process's own,
        charged to a tenant and the rates of a key. Lines beyond the rates wait.
        """
        self._jobs = jobs
        self._batches = batches
        self._call = call
        self._enter = enter
        self._concurrency = concurrency
        self._runs: dict[asyncio.Task[None], Job] = {}
        self._looks = asyncio.Event()
        self._is_stopping = False
        self._looking = asyncio.create_task(self._look(), name="batches")

    def wake(self) -> None:
        """There may be lines."""
        self._looks.set()

    async def stop(self) -> None:
        """Stops computing in this router; other routers continue the jobs."""
        self._is_stopping = True
        self._looks.set()
        await asyncio.wait([self._looking])  # to its end: claimed jobs must be put back
        for task in self._runs:
            task.cancel()
        if self._runs:
            await asyncio.wait(self._runs)

    # --- inside ---

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        renews_at, purges_at = loop.time(), loop.time() + PURGE_EVERY_S
        while not self._is_stopping:
            self._looks.clear()
            try:
                if loop.time() >= renews_at:
                    renews_at = loop.time() + LOOK_EVERY_S
                    await self._keep()
                if loop.time() >= purges_at:
                    purges_at = loop.time() + PURGE_EVERY_S
                    await self._batches.purge()
                await self._claim()
            except StoreError as error:
                logger.warning("lines of batches cannot be claimed: %s", error)
            except Exception:  # the next turn tries again
                logger.exception("lines of batches cannot be claimed: internal error")
            if not self._is_stopping:
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, renews_at - loop.time())):
                        await self._looks.wait()

    async def _keep(self) -> None:
        """Renews leases, and ends jobs whose lease was lost."""
        await self._batches.expire()
        if not self._runs:
            return
        asked = list(self._runs.values())
        kept = {id(job) for job in await self._jobs.renew(asked)}
        lost = {id(job) for job in asked} - kept
        for task, job in list(self._runs.items()):
            if id(job) in lost:
                task.cancel()

    async def _claim(self) -> None:
        room = self._concurrency - len(self._runs)
        for job in await self._jobs.claim(room, of_batches=True) if room > 0 else ():
            context = contextvars.Context()  # of no client
            task = context.run(asyncio.create_task, self._run(job), name="line of a batch")
            self._runs[task] = job
            task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[None]") -> None:
        del self._runs[task]
        if not task.cancelled():
            task.result()
        self._looks.set()

    async def _run(self, job: Job) -> None:
        try:
            await self._compute(job)
        except asyncio.CancelledError:
            with suppress(StoreError):
                await asyncio.shield(self._jobs.release(job))
            raise

    async def _compute(self, job: Job) -> None:
        self._enter(job.tenant, job.key_name)
        identity = Identity.of(job.identity)
        assert identity is not None, "it is written as this is read"
        line = json.loads(job.content)
        submission = Submission(identity=identity, attempt=job.num_claims)
        try:
            answer = await self._call(line["url"], job.tenant, _content(line["body"]), submission)
        except Exception as bug:
            logger.exception("a line of a batch failed: internal error")
            error = InternalError(f"the request failed: internal error ({type(bug).__name__})")
            answer = Response(OPENAI.body(http_error(error)), 500)
        if answer.headers.get("x-should-retry") == "true":
            await asyncio.sleep(AGAIN_AFTER_S)
            await self._release(job)
            return
        result, is_error = _result(job, answer), answer.status_code != 200
        while True:
            try:
                await self._batches.finish(job, result, is_error=is_error)
            except StoreError as error:
                logger.warning("a line of a batch cannot be stored yet: %s", error)
                await asyncio.sleep(AGAIN_AFTER_S)
            else:
                return

    async def _release(self, job: Job) -> None:
        try:
            await self._jobs.release(job)
        except StoreError as error:  # its lease runs out
            logger.warning("a line of a batch cannot be put back: %s", error)


def _content(body: Mapping[str, Any]) -> bytes:
    """The request of a line: at low priority, and stored only if its body asks for it."""
    return json.dumps({"store": False, **body, "priority": "low"}).encode()


def _result(job: Job, answer: Response) -> bytes:
    body = json.loads(bytes(answer.body))
    response = {"status_code": answer.status_code, "request_id": job.id, "body": body}
    return result_line(job.id, job.content, response, None)

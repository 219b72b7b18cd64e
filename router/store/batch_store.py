"""Batch store: batches, whose lines are jobs, and the files that the results are written to.

A line's result is written in the transaction that ends its job, and the last one ends the batch: whatever is killed,
each line is in one of the two files once. Within a file, results have the order of the lines.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.router.store.file_store import FILE, FileStore, hidden
from holdfast.router.store.job_store import CANCELLED, Job, JobStore
from holdfast.router.store.object_store import HELD_BACK, HIDDEN, Page, StoredObject
from holdfast.worker.errors import NotFoundError

if TYPE_CHECKING:
    import sqlalchemy

BATCH: Final = "batch"

RUNNING: Final = "in_progress"
COMPLETED: Final = "completed"
EXPIRED: Final = "expired"

_PREPARE_S: Final = 3600.0
"""Seconds after which a batch without all of its lines is deleted."""


class BatchStore:
    """Batches of one router. Methods raise `NotFoundError` for a batch that is not there, also of another tenant, and
    `StoreError` if the database fails.
    """

    def __init__(self, files: FileStore, jobs: JobStore) -> None:
        self._files = files
        self._objects = files.objects
        self._database = files.objects.database
        self._job_store = jobs
        self._jobs = self._database.tables.jobs

    # --- a new batch ---

    async def begin(self, tenant: str, batch_id: str, files: Mapping[str, str]) -> None:
        """Creates a batch that is not visible or computed yet. `files`: the ids of its files, `output` and `errors`."""

        def work(connection: "sqlalchemy.Connection") -> None:
            until = self._database.now(connection) + _PREPARE_S
            begun = StoredObject(kind=HIDDEN, id=batch_id, input=[dict(files)], object={}, expires_at=until)
            self._objects.insert(connection, tenant, begun)
            for file_id in files.values():
                self._objects.insert(connection, tenant, hidden(file_id, batch_id, until))

        await self._database.run(work)

    async def add(self, jobs: Sequence[Job]) -> None:
        """Lines of a batch that is being created, which wait until it exists."""

        def work(connection: "sqlalchemy.Connection") -> None:
            self._job_store.insert(connection, jobs, HELD_BACK)
            size = sum(len(job.content) for job in jobs)
            self._objects.grow(connection, jobs[0].tenant, jobs[0].object_id, size)

        await self._database.run(work)

    async def start(self, tenant: str, batch: dict[str, Any]) -> None:
        """Lets its lines be computed from now on."""

        def work(connection: "sqlalchemy.Connection") -> None:
            objects, jobs = self._database.tables.objects, self._jobs
            self._objects.read(connection, tenant, HIDDEN, batch["id"])
            mine = objects.c.tenant == tenant
            is_it = objects.update().where(mine, objects.c.id == batch["id"])
            connection.execute(is_it.values(kind=BATCH, expires_at=None))
            connection.execute(objects.update().where(mine, objects.c.parent_id == batch["id"]).values(expires_at=None))
            self._objects.update(connection, tenant, batch["id"], batch)
            lines = jobs.update().where(jobs.c.tenant == tenant, jobs.c.object_id == batch["id"])
            connection.execute(lines.values(lease_until=0))

        await self._database.run(work)

    async def fail(self, tenant: str, batch: dict[str, Any]) -> None:
        """Replaces a batch that is being created by one with the faults of its lines."""

        def work(connection: "sqlalchemy.Connection") -> None:
            objects = self._database.tables.objects
            connection.execute(objects.delete().where(objects.c.tenant == tenant, objects.c.parent_id == batch["id"]))
            failed = StoredObject(kind=BATCH, id=batch["id"], input=[], object=batch)
            self._objects.insert(connection, tenant, failed)

        await self._database.run(work)

    # --- existing batches ---

    async def get(self, tenant: str, batch_id: str) -> dict[str, Any]:
        """The batch with its current counts."""

        def work(connection: "sqlalchemy.Connection") -> dict[str, Any]:
            found = self._objects.read(connection, tenant, BATCH, batch_id)
            return self._counted(connection, tenant, found)

        return await self._database.run(work)

    async def listed(
        self, tenant: str, page: Page, is_selected: Callable[[dict[str, Any]], bool]
    ) -> tuple[list[dict[str, Any]], bool]:
        """Same as `ObjectStore.listed`."""
        batches, has_more = await self._objects.listed(tenant, BATCH, page, is_selected)
        return [await self.get(tenant, batch["id"]) for batch in batches], has_more

    async def delete(self, tenant: str, batch: Mapping[str, Any]) -> None:
        """Deletes a batch that is over, and its files."""
        for name in ("output_file_id", "error_file_id"):
            if batch[name] is not None:
                with suppress(NotFoundError):  # its time was up, or it was deleted by itself
                    await self._objects.delete(tenant, FILE, batch[name])
        await self._objects.delete(tenant, BATCH, batch["id"])

    async def cancel(self, tenant: str, batch_id: str, *, tells_lines: bool = False) -> dict[str, Any]:
        """The batch, ended: running lines are dropped, and results so far are in its files; with `tells_lines` also an
        error for each line without a result.
        """

        def work(connection: "sqlalchemy.Connection") -> dict[str, Any]:
            self._objects.lock(connection, tenant, batch_id)
            found = self._objects.read(connection, tenant, BATCH, batch_id)
            if found.object["status"] != RUNNING:
                return found.object
            self._drop_lines(connection, tenant, found, cancelled_line if tells_lines else None)
            return self._end(connection, tenant, found, CANCELLED)

        return await self._database.run(work)

    async def finish(self, job: Job, result: bytes, *, is_error: bool) -> bool:
        """Writes the result of a line, which ends with a line break. False: this router has lost the job."""
        is_mine = await self._database.run(partial(self._finish, job=job, result=result, is_error=is_error))
        await self._objects.purge_if_due()
        return is_mine

    async def purge(self) -> None:
        """Same as `ObjectStore.purge`."""
        await self._objects.purge()

    async def expire(self) -> None:
        """Ends the batches whose time is up, with an error for each line that has no result."""
        for tenant, batch_id in await self._database.run(self._overdue):
            await self._database.run(partial(self._expire, tenant=tenant, batch_id=batch_id))

    # --- within a transaction ---

    def _finish(self, connection: "sqlalchemy.Connection", job: Job, result: bytes, is_error: bool) -> bool:
        self._objects.lock(connection, job.tenant, job.object_id)  # first, as all who end lines or batches
        if not connection.execute(self._jobs.delete().where(*self._job_store.mine(job))).rowcount:
            return False
        found = self._objects.read(connection, job.tenant, BATCH, job.object_id)
        self._write(connection, job.tenant, found, job.number, result, is_error=is_error)
        self._objects.grow(connection, job.tenant, job.object_id, -len(job.content))
        if not self._has_lines(connection, job.tenant, job.object_id):
            self._end(connection, job.tenant, found, COMPLETED)
        return True

    def _write(
        self,
        connection: "sqlalchemy.Connection",
        tenant: str,
        found: StoredObject,
        number: int | None,
        result: bytes,
        *,
        is_error: bool,
    ) -> None:
        assert number is not None, "lines have numbers"
        file_id = found.input[0]["errors" if is_error else "output"]
        self._files.put(connection, tenant, file_id, number, result)

    def _has_lines(self, connection: "sqlalchemy.Connection", tenant: str, batch_id: str) -> bool:
        jobs = self._jobs
        left = jobs.select().where(jobs.c.tenant == tenant, jobs.c.object_id == batch_id).limit(1)
        return connection.execute(left).first() is not None

    def _end(
        self, connection: "sqlalchemy.Connection", tenant: str, found: StoredObject, status: str
    ) -> dict[str, Any]:
        """The batch as it is from here on; its files are there, if there is anything in them."""
        now = int(self._database.now(connection))
        batch = self._counted(connection, tenant, found)
        batch |= {"status": status, f"{status}_at": now}
        for name, file_id in found.input[0].items():
            if not (size := self._files.num_bytes(connection, tenant, file_id)):
                objects = self._database.tables.objects
                connection.execute(objects.delete().where(objects.c.tenant == tenant, objects.c.id == file_id))
                continue
            batch["output_file_id" if name == "output" else "error_file_id"] = file_id
            seconds = (batch.get("output_expires_after") or {}).get("seconds")
            until = None if seconds is None else now + seconds
            self._files.show(connection, tenant, _file(batch, name, file_id, size, now, until), until)
        self._objects.update(connection, tenant, found.id, batch)
        return batch

    def _counted(self, connection: "sqlalchemy.Connection", tenant: str, found: StoredObject) -> dict[str, Any]:
        batch = found.object
        if batch["status"] != RUNNING:
            return batch
        completed, failed = (
            self._files.num_pieces(connection, tenant, found.input[0][name]) for name in ("output", "errors")
        )
        return {**batch, "request_counts": {**batch["request_counts"], "completed": completed, "failed": failed}}

    def _overdue(self, connection: "sqlalchemy.Connection") -> list[tuple[str, str]]:
        """Batches that have lines although their time is up."""
        from sqlalchemy import exists, select

        jobs, objects, now = self._jobs, self._database.tables.objects, self._database.now(connection)
        has_line = (objects.c.tenant == jobs.c.tenant) & (objects.c.id == jobs.c.object_id)
        waiting = select(objects.c.tenant, objects.c.id, objects.c.object).where(objects.c.kind == BATCH)
        rows = connection.execute(waiting.where(exists().where(has_line))).all()
        return [(row.tenant, row.id) for row in rows if json.loads(row.object)["expires_at"] <= now]

    def _expire(self, connection: "sqlalchemy.Connection", tenant: str, batch_id: str) -> None:
        self._objects.lock(connection, tenant, batch_id)
        found = self._objects.read(connection, tenant, BATCH, batch_id)
        if found.object["status"] != RUNNING:
            return
        self._drop_lines(connection, tenant, found, expired_line)
        self._end(connection, tenant, found, EXPIRED)

    def _drop_lines(
        self,
        connection: "sqlalchemy.Connection",
        tenant: str,
        found: StoredObject,
        result: Callable[[str, bytes], bytes] | None,
    ) -> None:
        """Drops the lines that have no result, and writes one for each if `result` makes it. Their number is the
        batch's `num_left`.
        """
        jobs = self._jobs
        is_left = jobs.c.tenant == tenant, jobs.c.object_id == found.id
        if result is not None:
            rows = connection.execute(jobs.select().where(*is_left)).all()
            found.object["num_left"] = len(rows)
            for row in rows:
                self._write(connection, tenant, found, row.number, result(row.id, row.content), is_error=True)
        connection.execute(jobs.delete().where(*is_left))


def cancelled_line(job_id: str, line: bytes) -> bytes:
    """The result of a line whose batch was cancelled before."""
    error = {"code": "batch_cancelled", "message": "This request was not executed: its batch was cancelled."}
    return result_line(job_id, line, None, error)


def expired_line(job_id: str, line: bytes) -> bytes:
    """The result of a line that was not computed in time."""
    error = {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    }
    return result_line(job_id, line, None, error)


def result_line(job_id: str, line: bytes, response: Mapping[str, Any] | None, error: Mapping[str, str] | None) -> bytes:
    """The result of a line, as it is in one of the files."""
    made = {
        "id": f"batch_req_{job_id}",
        "custom_id": json.loads(line)["custom_id"],
        "response": response,
        "error": error,
    }
    return json.dumps(made).encode() + b"\n"


def _file(
    batch: Mapping[str, Any], name: str, file_id: str, size: int, now: int, expires_at: int | None
) -> dict[str, Any]:
    return {
        "id": file_id,
        "object": "file",
        "bytes": size,
        "created_at": now,
        "expires_at": expires_at,
        "filename": f"{batch['id']}_{name}.jsonl",
        "purpose": "batch_output",
        "status": "processed",
        "status_details": None,
    }

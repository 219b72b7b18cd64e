"""The batch store on SQLite and PostgreSQL: the last line ends the batch, whoever writes it, and nothing is purged that
is under way.
"""

import asyncio
import json

import pytest

from holdfast.router.store.batch_store import BatchStore
from holdfast.router.store.database import Database
from holdfast.router.store.file_store import FileStore
from holdfast.router.store.job_store import Job, JobStore
from holdfast.router.store.object_store import ObjectStore, StoreLimits
from holdfast.router.store.response_store import ResponseStore
from holdfast.worker.errors import NotFoundError
from tests.loops import on_a_loop
from tests.router.store.test_response_store import place, postgresql

__all__ = ["place", "postgresql"]  # fixtures


class Opened:
    """One router's stores."""

    def __init__(self, objects: ObjectStore, owner: str) -> None:
        self.objects = objects
        self.jobs = JobStore(ResponseStore(objects), owner)
        self.files = FileStore(objects)
        self.batches = BatchStore(self.files, self.jobs)


async def opened(place: str, owner: str, **limits: float) -> Opened:
    return Opened(ObjectStore(await Database.open(place), StoreLimits(**limits)), owner)


async def begun(one: Opened, name: str, num_lines: int) -> None:
    await one.batches.begin("t", name, {"output": f"{name}-out", "errors": f"{name}-err"})
    lines = [json.dumps({"custom_id": str(number)}).encode() for number in range(num_lines)]
    jobs = [
        Job(tenant="t", id=f"{name}-{number}", object_id=name, number=number, content=line, identity=f"{name} 7")
        for number, line in enumerate(lines)
    ]
    await one.batches.add(jobs)
    assert await one.jobs.claim(1, of_batches=True) == []
    counts = {"total": num_lines, "completed": 0, "failed": 0}
    await one.batches.start("t", {"id": name, "status": "in_progress", "request_counts": counts, "expires_at": 2**40})


async def drop(one: Opened, *names: str) -> None:
    for name in names:
        await one.objects.delete("t", "batch", name)
        await one.objects.delete("t", "file", f"{name}-out")


@on_a_loop
async def test_of_two_routers_that_write_the_last_lines_at_once_one_ends_the_batch(place):
    routers = [await opened(place, name) for name in ("first", "second")]
    for number in range(12):
        name = f"batch_{number}"
        await begun(routers[0], name, 2)
        claimed = [await one.jobs.claim(1, of_batches=True) for one in routers]
        assert [len(jobs) for jobs in claimed] == [1, 1]
        done = [
            one.batches.finish(job, b"line %d\n" % job.number, is_error=False)
            for one, (job,) in zip(routers, claimed, strict=True)
        ]
        assert await asyncio.gather(*done) == [True, True]
        over = await routers[0].batches.get("t", name)
        assert (over["status"], over["request_counts"]["completed"]) == ("completed", 2)
        content = [piece async for piece in routers[1].files.content("t", over["output_file_id"])]
        assert content == [b"line 0\n", b"line 1\n"]
        with pytest.raises(NotFoundError):
            await routers[0].objects.get("t", "file", f"{name}-err")
        await drop(routers[0], name)
    for one in routers:
        await one.objects.database.close()


@on_a_loop
async def test_what_a_batch_needs_is_kept_however_full_the_store_is(place):
    one = await opened(place, "only", max_bytes=1000)
    await begun(one, "batch_full", 3)
    for job in await one.jobs.claim(2, of_batches=True):
        assert await one.batches.finish(job, b"x" * 900 + b"\n", is_error=False)
    await one.objects.purge()
    (last,) = await one.jobs.claim(2, of_batches=True)
    assert await one.batches.finish(last, b"y\n", is_error=False)
    await one.objects.purge()
    with pytest.raises(NotFoundError):  # it is over, and too large
        await one.objects.get("t", "file", "batch_full-out")
    await one.objects.database.close()

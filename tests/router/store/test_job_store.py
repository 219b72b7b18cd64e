"""The job store: one owner at a time, leases that run out, pieces in order, and what a lost owner may not do."""

import pytest

from holdfast.router.store import database
from holdfast.router.store.database import Database
from holdfast.router.store.job_store import LEASE_S, Job, JobStore
from holdfast.router.store.object_store import ObjectStore, StoreLimits
from holdfast.router.store.response_store import ResponseStore, StoredResponse
from holdfast.worker.errors import InvalidRequestError, NotFoundError
from tests.loops import on_a_loop
from tests.router.store.test_response_store import place, postgresql

__all__ = ["place", "postgresql"]  # fixtures


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def queued(name: str) -> StoredResponse:
    response = {"id": name, "output": [], "background": True, "status": "queued"}
    return StoredResponse(id=name, previous_id=None, input=[], response=response)


def job_of(name: str) -> Job:
    return Job(tenant="t", id=name, object_id=name, content=b"{}", identity=f"{name} 7")


@on_a_loop
async def test_a_job_has_one_owner_whose_lease_runs_out(place):
    clock = Clock()
    store = ResponseStore(ObjectStore(await Database.open(place, clock), StoreLimits()))
    first, second = JobStore(store, "first"), JobStore(store, "second")
    job = job_of("a")
    await first.submit(job, queued("a"))
    assert await second.claim(8) == []
    assert await first.add(job, b"one", {**queued("a").response, "status": "in_progress"})
    clock.now += LEASE_S - 0.1
    assert await first.add(job, b"two")
    clock.now += LEASE_S - 0.1
    assert await second.claim(8) == []
    clock.now += 0.2
    (taken,) = await second.claim(8)
    assert (taken.id, taken.pieces, taken.num_claims, taken.identity) == ("a", [b"one", b"two"], 2, "a 7")
    assert not await first.add(job, b"late")
    assert not await first.finish(job, b"late", {"status": "completed"})
    assert await first.claim(8) == []
    assert await second.finish(taken, b"three", {**taken_response(), "status": "completed"})
    assert await first.pieces("t", "a", 1) == ([b"two", b"three"], True)
    assert (await store.get("t", "a")).response["status"] == "completed"
    assert await second.claim(8) == []
    await store.delete("t", "a")
    with pytest.raises(NotFoundError):
        await first.pieces("t", "a", 0)
    await store.database.close()


def taken_response() -> dict[str, object]:
    return queued("a").response


@on_a_loop
async def test_what_is_released_is_claimed_at_once_also_by_the_same_router(place):
    store = ResponseStore(ObjectStore(await Database.open(place, Clock()), StoreLimits()))
    jobs, old = JobStore(store, "only"), job_of("b")
    await jobs.submit(old, queued("b"))
    await jobs.release(old)
    (again,) = await jobs.claim(8)
    assert again.num_claims == 2
    assert not await jobs.add(old, b"by the claim before")
    assert await jobs.add(again, b"one")
    await store.delete("t", "b")
    assert not await jobs.add(again, b"after it was deleted")
    await store.database.close()


@on_a_loop
async def test_cancelling_ends_a_job_for_its_owner(place):
    store = ResponseStore(ObjectStore(await Database.open(place, Clock()), StoreLimits()))
    jobs, job = JobStore(store, "only"), job_of("c")
    await jobs.submit(job, queued("c"))
    for _ in range(2):
        assert (await jobs.cancel("t", "c"))["status"] == "cancelled"
    assert not await jobs.finish(job, b"", {"status": "completed"})
    assert (await jobs.pieces("t", "c", 0)) == ([], True)
    with pytest.raises(NotFoundError):
        await jobs.cancel("another", "c")
    await store.save("t", StoredResponse(id="d", previous_id=None, input=[], response={"background": False}))
    with pytest.raises(InvalidRequestError, match="must be a background response"):
        await jobs.cancel("t", "d")
    for name in ("c", "d"):
        await store.delete("t", name)
    await store.database.close()


@on_a_loop
async def test_streams_count_for_the_size_of_the_store(tmp_path):
    clock = Clock()
    store = ResponseStore(ObjectStore(await Database.open(str(tmp_path), clock), StoreLimits(max_bytes=3000)))
    jobs = JobStore(store, "only")
    for name in ("a", "b", "c", "d"):
        clock.now += 1
        job = job_of(name)
        await jobs.submit(job, queued(name))
        assert await jobs.finish(job, b"x" * 900, {**queued(name).response, "status": "completed"})
    with pytest.raises(NotFoundError):
        await store.get("t", "a")
    assert (await store.get("t", "d")).id == "d"
    await store.database.close()


@on_a_loop
async def test_hosts_whose_clocks_differ_agree_on_leases_by_the_clock_of_the_server(postgresql, monkeypatch):
    first = ResponseStore(ObjectStore(await Database.open(postgresql), StoreLimits()))
    jobs, job = JobStore(first, "first"), job_of("far")
    await jobs.submit(job, queued("far"))
    monkeypatch.setattr(database.time, "time", lambda: 2e9)  # of the other host
    other = ResponseStore(ObjectStore(await Database.open(postgresql), StoreLimits()))
    assert await JobStore(other, "other").claim(8) == []
    await jobs.release(job)
    assert len(await JobStore(other, "other").claim(8)) == 1
    await first.delete("t", "far")
    for store in (first, other):
        await store.database.close()

"""Job store: background responses that are not over, each leased to one router at a time, and their streams so far.

A router that has a job renews its lease with each piece of the stream that it stores. Once the lease has run out,
because the router or the whole cluster has ended, any router claims the job and goes on after the last piece. A piece
is stored only by the owner: of two routers that both claim a job, one gets an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.router.store.response_store import ResponseStore, StoredResponse
from holdfast.worker.errors import InvalidRequestError

if TYPE_CHECKING:
    import sqlalchemy

LEASE_S: Final = 5.0

CANCELLED: Final = "cancelled"
_OPEN: Final = ("queued", "in_progress")


@dataclass(slots=True, kw_only=True)
class Job:
    """One background response, as its owner has it."""

    tenant: str
    id: str
    """Of the response."""
    content: bytes
    """The body of the request."""
    identity: str
    """As `Identity.text`."""
    num_claims: int = 1
    """Routers that have had it, and the times that it was begun again."""
    pieces: list[bytes] = field(default_factory=list)
    """What was stored of its stream when it was claimed."""
    num_pieces: int = 0
    """All so far."""


class JobStore:
    """Of one router, whose name among the owners is `owner`."""

    def __init__(self, store: ResponseStore, owner: str) -> None:
        self._store = store
        self._database = store.database
        self._jobs, self._pieces = self._database.tables.jobs, self._database.tables.pieces
        self._owner = owner

    async def submit(self, job: Job, queued: StoredResponse) -> None:
        """A new job of this router, whose response is `queued`."""
        row = {
            "tenant": job.tenant,
            "id": job.id,
            "content": job.content,
            "identity": job.identity,
            "num_claims": 1,
            "owner": self._owner,
            "lease_until": self._database.now() + LEASE_S,
        }

        def insert(connection: "sqlalchemy.Connection") -> None:
            self._store.insert(connection, self._store.row(job.tenant, queued))
            connection.execute(self._jobs.insert(), row)

        await self._database.run(insert)

    async def claim(self) -> Job | None:
        """A job whose lease has run out, if there is one, which is this router's from here on."""
        return await self._database.run(self._claim)

    async def add(self, job: Job, piece: bytes, response: dict[str, Any] | None = None) -> bool:
        """Stores a piece of the stream, which may be empty, and renews the lease. False: the job is not this router's
        any more. `response`: what its object is from here on.
        """
        return await self._database.run(partial(self._add, job=job, piece=piece, response=response, is_over=False))

    async def finish(self, job: Job, piece: bytes, response: dict[str, Any]) -> bool:
        """As `add`, with the last piece: the job is over."""
        is_mine = await self._database.run(partial(self._add, job=job, piece=piece, response=response, is_over=True))
        await self._store.purge_if_due()
        return is_mine

    async def release(self, job: Job) -> None:
        """Another router may have it at once."""
        free = self._jobs.update().where(*self._mine(job)).values(lease_until=0)
        await self._database.run(lambda connection: connection.execute(free))

    async def cancel(self, tenant: str, response_id: str) -> dict[str, Any]:
        """The response object, which is over. Raises `NotFoundError`, and `InvalidRequestError` for one that was not
        made in the background.
        """

        def cancel(connection: "sqlalchemy.Connection") -> dict[str, Any]:
            jobs, response = self._jobs, self._store.read(connection, tenant, response_id).response
            if not response["background"]:
                raise InvalidRequestError("response_id", response_id, "must be a background response")
            gone = connection.execute(jobs.delete().where(jobs.c.tenant == tenant, jobs.c.id == response_id)).rowcount
            if gone:
                response = {**response, "status": CANCELLED}
                self._store.update(connection, tenant, response_id, response)
            return response

        return await self._database.run(cancel)

    async def pieces(self, tenant: str, response_id: str, first: int) -> tuple[list[bytes], bool]:
        """The stream from piece `first` on, and whether that is all of it. Raises `NotFoundError`."""

        def read(connection: "sqlalchemy.Connection") -> tuple[list[bytes], bool]:
            response = self._store.read(connection, tenant, response_id).response
            return self._read_pieces(connection, tenant, response_id, first), response["status"] not in _OPEN

        return await self._database.run(read)

    # --- within a transaction ---

    def _mine(self, job: Job) -> "Sequence[sqlalchemy.ColumnElement[bool]]":
        jobs = self._jobs
        return (
            jobs.c.tenant == job.tenant,
            jobs.c.id == job.id,
            jobs.c.owner == self._owner,
            (jobs.c.num_claims == job.num_claims),
        )

    def _claim(self, connection: "sqlalchemy.Connection") -> Job | None:
        jobs, now = self._jobs, self._database.now()
        is_free = jobs.c.lease_until < now
        for row in connection.execute(jobs.select().where(is_free).order_by(jobs.c.lease_until).limit(8)).all():
            mine = jobs.update().where(jobs.c.tenant == row.tenant, jobs.c.id == row.id, is_free)
            claimed = {"owner": self._owner, "num_claims": row.num_claims + 1, "lease_until": now + LEASE_S}
            if connection.execute(mine.values(claimed)).rowcount:
                pieces = self._read_pieces(connection, row.tenant, row.id, 0)
                return Job(
                    tenant=row.tenant,
                    id=row.id,
                    content=row.content,
                    identity=row.identity,
                    num_claims=row.num_claims + 1,
                    pieces=pieces,
                    num_pieces=len(pieces),
                )
        return None

    def _read_pieces(
        self, connection: "sqlalchemy.Connection", tenant: str, response_id: str, first: int
    ) -> list[bytes]:
        pieces = self._pieces
        asked = pieces.select().where(pieces.c.tenant == tenant, pieces.c.id == response_id, pieces.c.number >= first)
        return [row.data for row in connection.execute(asked.order_by(pieces.c.number)).all()]

    def _add(
        self,
        connection: "sqlalchemy.Connection",
        job: Job,
        piece: bytes,
        response: dict[str, Any] | None,
        *,
        is_over: bool,
    ) -> bool:
        mine = self._mine(job)
        renewed = self._jobs.update().where(*mine).values(lease_until=self._database.now() + LEASE_S)
        if not connection.execute(self._jobs.delete().where(*mine) if is_over else renewed).rowcount:
            return False
        if piece:
            row = {"tenant": job.tenant, "id": job.id, "number": job.num_pieces, "data": piece}
            connection.execute(self._pieces.insert(), row)
            self._store.grow(connection, job.tenant, job.id, len(piece))
            job.num_pieces += 1
        if response is not None:
            self._store.update(connection, job.tenant, job.id, response)
        return True

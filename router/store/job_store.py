"""Job store: background computations of stored objects, each leased to one router at a time.

A job is a background response, or a line of a batch. A router that has jobs renews their leases. When a lease has
expired, because the router or the whole cluster has ended, any router claims the job; a response continues after its
stored stream. Only the owner can write a job's result, in the transaction that ends it: of two routers that both claim
a job, one gets an error.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.router.store.response_store import OPEN, ResponseStore, StoredResponse
from holdfast.worker.errors import InvalidRequestError

if TYPE_CHECKING:
    import sqlalchemy

LEASE_S: Final = 5.0

CANCELLED: Final = "cancelled"


@dataclass(slots=True, kw_only=True)
class Job:
    """One job, as its owner has it."""

    tenant: str
    id: str
    """Id of the response; that of a line is made from its batch's."""
    object_id: str
    """The response or the batch."""
    number: int | None = None
    """Number of a line in its batch, from 1."""
    content: bytes
    """Request of a response in `background`'s form; line of a batch."""
    identity: str
    """Same as `Identity.text`."""
    key_name: str = ""
    """The API key that asked for it, whose rate of tokens is charged; empty: none."""
    num_claims: int = 1
    """Routers that have had it, and the times that it was begun again."""
    pieces: list[bytes] = field(default_factory=list)
    """Stored pieces of a response's stream when it was claimed."""
    num_pieces: int = 0
    """All so far."""


class JobStore:
    """Jobs of one router, whose name among the owners is `owner`."""

    def __init__(self, store: ResponseStore, owner: str) -> None:
        self._store = store
        self._database = store.database
        self._jobs, self._pieces = self._database.tables.jobs, self._database.tables.pieces
        self._owner = owner

    async def submit(self, job: Job, queued: StoredResponse) -> None:
        """A new job of this router, whose response is `queued`."""

        def insert(connection: "sqlalchemy.Connection") -> None:
            self._store.insert(connection, job.tenant, queued)
            self.insert(connection, [job], self._database.now(connection) + LEASE_S)

        await self._database.run(insert)

    async def claim(self, most: int, *, of_batches: bool = False) -> list[Job]:
        """Claims at most `most` jobs whose lease has run out, the oldest first; they are this router's from now on."""
        return await self._database.run(partial(self._claim, most=most, of_batches=of_batches))

    async def renew(self, jobs: Collection[Job]) -> list[Job]:
        """Jobs that are still this router's; their leases are renewed."""

        def renew(connection: "sqlalchemy.Connection") -> list[Job]:
            until = self._database.now(connection) + LEASE_S
            renewed = self._jobs.update().values(lease_until=until)
            return [job for job in jobs if connection.execute(renewed.where(*self.mine(job))).rowcount]

        return await self._database.run(renew)

    async def add(self, job: Job, piece: bytes, response: dict[str, Any] | None = None) -> bool:
        """Stores a piece of the stream, which may be empty, and renews the lease. False: this router has lost the job.
        `response`: what its object is from here on.
        """
        return await self._database.run(partial(self._add, job=job, piece=piece, response=response, is_over=False))

    async def finish(self, job: Job, piece: bytes, response: dict[str, Any]) -> bool:
        """Like `add`, with the last piece: the job is over."""
        is_mine = await self._database.run(partial(self._add, job=job, piece=piece, response=response, is_over=True))
        await self._store.objects.purge_if_due()
        return is_mine

    async def release(self, job: Job) -> None:
        """Another router may have it at once."""
        free = self._jobs.update().where(*self.mine(job)).values(lease_until=0)
        await self._database.run(lambda connection: connection.execute(free))

    async def cancel(self, tenant: str, response_id: str) -> dict[str, Any]:
        """The response object, which is over. Raises `NotFoundError`, and `InvalidRequestError` for a response that was
        not created in the background.
        """

        def cancel(connection: "sqlalchemy.Connection") -> dict[str, Any]:
            jobs, response = self._jobs, self._store.read(connection, tenant, response_id).response
            if not response["background"]:
                raise InvalidRequestError("response_id", response_id, "must be a background response")
            gone = connection.execute(
                jobs.delete().where(jobs.c.tenant == tenant, jobs.c.object_id == response_id)
            ).rowcount
            if gone:
                response = {**response, "status": CANCELLED}
                self._store.objects.update(connection, tenant, response_id, response)
            return response

        return await self._database.run(cancel)

    async def pieces(self, tenant: str, response_id: str, first: int) -> tuple[list[bytes], bool]:
        """The stream from piece `first` on, and whether that is all of it. Raises `NotFoundError`."""

        def read(connection: "sqlalchemy.Connection") -> tuple[list[bytes], bool]:
            response = self._store.read(connection, tenant, response_id).response
            return self._read_pieces(connection, tenant, response_id, first), response["status"] not in OPEN

        return await self._database.run(read)

    # --- within a transaction ---

    def mine(self, job: Job) -> "Sequence[sqlalchemy.ColumnElement[bool]]":
        """Conditions of a job's row that hold while it is this router's."""
        jobs = self._jobs
        return (
            jobs.c.tenant == job.tenant,
            jobs.c.id == job.id,
            jobs.c.owner == self._owner,
            jobs.c.num_claims == job.num_claims,
        )

    def insert(self, connection: "sqlalchemy.Connection", jobs: Sequence[Job], lease_until: float) -> None:
        """New jobs of this router."""
        of_all = {
            "owner": self._owner,
            "lease_until": lease_until,
            "num_claims": 1,
            "made_at": self._database.now(connection),
        }
        names = "tenant", "id", "object_id", "number", "content", "identity", "key_name"
        rows = [{**of_all, **{name: getattr(job, name) for name in names}} for job in jobs]
        connection.execute(self._jobs.insert(), rows)

    def _claim(self, connection: "sqlalchemy.Connection", most: int, of_batches: bool) -> list[Job]:
        jobs, now = self._jobs, self._database.now(connection)
        is_free = jobs.c.lease_until < now
        is_line = jobs.c.number.is_not(None) if of_batches else jobs.c.number.is_(None)
        free = jobs.select().where(is_free, is_line).order_by(jobs.c.made_at, jobs.c.number).limit(most)
        claimed = []
        for row in connection.execute(free).all():
            mine = jobs.update().where(jobs.c.tenant == row.tenant, jobs.c.id == row.id, is_free)
            given = {"owner": self._owner, "num_claims": row.num_claims + 1, "lease_until": now + LEASE_S}
            if connection.execute(mine.values(given)).rowcount:
                claimed.append(self._read_job(connection, row))
        return claimed

    def _read_job(self, connection: "sqlalchemy.Connection", row: "sqlalchemy.Row[Any]") -> Job:
        """The job as it is once it is claimed."""
        pieces = [] if row.number is not None else self._read_pieces(connection, row.tenant, row.object_id, 0)
        return Job(
            tenant=row.tenant,
            id=row.id,
            object_id=row.object_id,
            number=row.number,
            content=row.content,
            identity=row.identity,
            key_name=row.key_name,
            num_claims=row.num_claims + 1,
            pieces=pieces,
            num_pieces=len(pieces),
        )

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
        mine = self.mine(job)
        renewed = self._jobs.update().where(*mine).values(lease_until=self._database.now(connection) + LEASE_S)
        if not connection.execute(self._jobs.delete().where(*mine) if is_over else renewed).rowcount:
            return False
        objects = self._store.objects
        if piece:
            row = {"tenant": job.tenant, "id": job.object_id, "number": job.num_pieces, "data": piece}
            connection.execute(self._pieces.insert(), row)
            objects.grow(connection, job.tenant, job.object_id, len(piece))
            job.num_pieces += 1
        if response is not None:
            objects.update(connection, job.tenant, job.object_id, response)
        if is_over:
            stored = self._store.read(connection, job.tenant, job.object_id)
            self._store.extend_conversation(connection, job.tenant, stored)
        return True

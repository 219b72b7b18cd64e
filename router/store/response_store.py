"""Response store: responses and the input that they answer, in a database that outlives the router.

    store = ResponseStore(await Database.open("/var/lib/holdfast"), StoreLimits())
    await store.save(tenant, response)
    turns = await store.turns(tenant, response.id, max_bytes)  # the conversation that ends with it

SQLite below a folder serves the routers of one host; PostgreSQL those of several.
"""

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.router.store.database import Database
from holdfast.worker.errors import InvalidRequestError, NotFoundError

if TYPE_CHECKING:
    import sqlalchemy

MAX_TURNS: Final = 4096
"""Of one conversation."""

MAX_ID_LENGTH: Final = 512

_PURGES_PER_STORE: Final = 64
"""A purge follows each time that a 64th of `max_bytes` was written, and each time that a router starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """What a store keeps, of all tenants together."""

    max_bytes: int = 2**30
    """Of inputs and responses as JSON; beyond it the oldest are deleted."""
    retention_s: float = 30 * 86400.0
    """Age at which a response is deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One turn of a conversation."""

    id: str
    created_at: int
    """Seconds since 1970."""
    previous_id: str | None
    """The response that it continues."""
    input: list[dict[str, Any]]
    """Items of this turn alone."""
    response: dict[str, Any]
    """The response object."""

    def items(self) -> list[dict[str, Any]]:
        """Input and output of the turn, as the input of the next one has them."""
        return [*self.input, *self.response["output"]]


class ResponseStore:
    """Of one router. Methods raise `StoreError` where the database fails."""

    def __init__(self, database: Database, limits: StoreLimits) -> None:
        self.database = database
        self._table = database.tables.responses
        self._limits = limits
        self._num_written = 0

    async def save(self, tenant: str, stored: StoredResponse) -> None:
        """Durably. One of the same id is replaced: the same request was submitted again."""
        row = self.row(tenant, stored)
        await self.database.run(partial(self.insert, row=row))
        self._num_written += row["num_bytes"]
        await self.purge_if_due()

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises `NotFoundError`, also for one of another tenant."""
        return await self.database.run(lambda connection: self.read(connection, tenant, response_id))

    async def turns(self, tenant: str, response_id: str, max_bytes: int) -> list[StoredResponse]:
        """The conversation that ends with a response, oldest turn first. Raises `InvalidRequestError` where a turn is
        missing, or they are too many or too large.
        """
        turns = await self.database.run(lambda connection: self._chain(connection, tenant, response_id, max_bytes))
        field, last = "previous_response_id", turns[0].previous_id if turns else response_id
        if last is not None and len(turns) < MAX_TURNS:
            raise InvalidRequestError(field, response_id, f"must be stored: {last!r} is not, or no more")
        if last is not None:
            raise InvalidRequestError(field, response_id, f"must continue at most {MAX_TURNS} responses")
        return turns

    async def delete(self, tenant: str, response_id: str) -> None:
        """For good: its text is overwritten. Raises `NotFoundError`."""
        table = self._table
        gone = table.delete().where(table.c.tenant == tenant, table.c.id == response_id)
        if not (await self.database.run(lambda connection: connection.execute(gone).rowcount)):
            raise NotFoundError("response", response_id)
        await self.database.empty_log()

    async def purge_if_due(self) -> None:
        """Purges once enough was written."""
        if self._num_written > self._limits.max_bytes // _PURGES_PER_STORE:
            await self.purge()

    async def purge(self) -> None:
        """Deletes what is too old, and the oldest while there is too much."""
        self._num_written = 0
        await self.database.run(self._purge)
        await self.database.empty_log()

    # --- within a transaction ---

    def row(self, tenant: str, stored: StoredResponse) -> dict[str, Any]:
        """Of the table."""
        given, response = json.dumps(stored.input), json.dumps(stored.response)  # ASCII: lone surrogates are escaped
        return {
            "tenant": tenant,
            "id": stored.id,
            "previous_id": stored.previous_id,
            "created_at": stored.created_at,
            "saved_at": self.database.now(),
            "input": given,
            "response": response,
            "num_bytes": len(given) + len(response),
        }

    def insert(self, connection: "sqlalchemy.Connection", row: dict[str, Any]) -> None:
        """In the place of what has its id."""
        table = self._table
        connection.execute(table.delete().where(table.c.tenant == row["tenant"], table.c.id == row["id"]))
        connection.execute(table.insert(), row)

    def update(
        self, connection: "sqlalchemy.Connection", tenant: str, response_id: str, response: dict[str, Any]
    ) -> None:
        """The response object of a row."""
        table, text = self._table, json.dumps(response)
        found = table.update().where(table.c.tenant == tenant, table.c.id == response_id)
        grown = table.c.num_bytes - _length(table.c.response) + len(text)
        connection.execute(found.values(response=text, num_bytes=grown))
        self._num_written += len(text)

    def grow(self, connection: "sqlalchemy.Connection", tenant: str, response_id: str, num_bytes: int) -> None:
        """So many bytes more belong to a row."""
        table = self._table
        found = table.update().where(table.c.tenant == tenant, table.c.id == response_id)
        connection.execute(found.values(num_bytes=table.c.num_bytes + num_bytes))
        self._num_written += num_bytes

    def read(self, connection: "sqlalchemy.Connection", tenant: str, response_id: str) -> StoredResponse:
        """Raises `NotFoundError`."""
        table = self._table
        row = connection.execute(table.select().where(table.c.tenant == tenant, table.c.id == response_id)).first()
        if row is None:
            raise NotFoundError("response", response_id)
        return StoredResponse(
            id=row.id,
            created_at=row.created_at,
            previous_id=row.previous_id,
            input=json.loads(row.input),
            response=json.loads(row.response),
        )

    def _chain(
        self, connection: "sqlalchemy.Connection", tenant: str, response_id: str, max_bytes: int
    ) -> list[StoredResponse]:
        """The response and those before it, oldest first, as far as they are there."""
        from sqlalchemy import literal, select

        table = self._table
        first = select(table.c.id, table.c.previous_id, table.c.num_bytes, literal(0).label("depth"))
        chain = first.where(table.c.tenant == tenant, table.c.id == response_id).cte("chain", recursive=True)
        before = select(table.c.id, table.c.previous_id, table.c.num_bytes, (chain.c.depth + 1).label("depth"))
        chain = chain.union_all(
            before.where(table.c.tenant == tenant, table.c.id == chain.c.previous_id, chain.c.depth < MAX_TURNS - 1)
        )
        found = connection.execute(select(chain).order_by(chain.c.depth.desc())).all()
        if (size := sum(row.num_bytes for row in found)) > max_bytes:
            message = f"must be a conversation of at most {max_bytes} bytes (limits.max_message_bytes), has {size}"
            raise InvalidRequestError("previous_response_id", response_id, message)
        return [self.read(connection, tenant, row.id) for row in found]

    def _purge(self, connection: "sqlalchemy.Connection") -> None:
        from sqlalchemy import func, select

        table = self._table
        connection.execute(table.delete().where(table.c.saved_at < self.database.now() - self._limits.retention_s))
        later = func.sum(table.c.num_bytes).over(order_by=(table.c.saved_at.desc(), table.c.tenant, table.c.id))
        sizes = select(table.c.tenant, table.c.id, later.label("size")).subquery()
        beyond = select(sizes.c.tenant, sizes.c.id).where(sizes.c.size > self._limits.max_bytes)
        for row in connection.execute(beyond).all():
            connection.execute(table.delete().where(table.c.tenant == row.tenant, table.c.id == row.id))


def _length(column: "sqlalchemy.Column[str]") -> Any:
    from sqlalchemy import func

    return func.length(column)

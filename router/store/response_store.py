"""Response store: responses and the input that they answer, in a database that outlives the router.

    store = await ResponseStore.open("/var/lib/holdfast", StoreLimits())
    await store.save(tenant, response)
    turns = await store.turns(tenant, response.id)  # the conversation that ends with it

SQLite below a folder serves the routers of one host; PostgreSQL those of several.
"""

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from holdfast.router.store.database import opened
from holdfast.worker.errors import InvalidRequestError, NotFoundError, StoreError

if TYPE_CHECKING:
    import sqlalchemy

T = TypeVar("T")

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
    """Used from one event loop. The database is called on a thread. Methods raise `StoreError` where it fails."""

    def __init__(
        self, engine: "sqlalchemy.Engine", table: "sqlalchemy.Table", limits: StoreLimits, now: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._table = table
        self._limits = limits
        self._now = now
        self._num_written = 0
        self._thread = ThreadPoolExecutor(1, "response store")

    @classmethod
    async def open(cls, place: str, limits: StoreLimits, now: Callable[[], float] = time.time) -> Self:
        """At a folder, which is made, or at a `postgresql://` URL. Raises `StoreError`."""
        store = await asyncio.to_thread(lambda: cls(*opened(place), limits, now))
        await store.purge()
        return store

    async def close(self) -> None:
        """What is being written is written to its end."""
        await asyncio.to_thread(self._thread.shutdown)
        self._engine.dispose()

    async def save(self, tenant: str, stored: StoredResponse) -> None:
        """Durably. One of the same id is replaced: the same request was submitted again."""
        await self._run(partial(self._save, tenant, stored))

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises `NotFoundError`, also for one of another tenant."""
        found = await self._run(partial(self._chain, tenant, response_id, 1))
        if not found:
            raise NotFoundError("response", response_id)
        return found[0]

    async def turns(self, tenant: str, response_id: str, max_bytes: int) -> list[StoredResponse]:
        """The conversation that ends with a response, oldest turn first. Raises `InvalidRequestError` where a turn is
        missing, or they are too many or too large.
        """
        turns = await self._run(partial(self._chain, tenant, response_id, MAX_TURNS, max_bytes))
        field, last = "previous_response_id", turns[0].previous_id if turns else response_id
        if last is not None and len(turns) < MAX_TURNS:
            raise InvalidRequestError(field, response_id, f"must be stored: {last!r} is not, or no more")
        if last is not None:
            raise InvalidRequestError(field, response_id, f"must continue at most {MAX_TURNS} responses")
        return turns

    async def delete(self, tenant: str, response_id: str) -> None:
        """For good: its text is overwritten. Raises `NotFoundError`."""
        if not await self._run(partial(self._delete, tenant, response_id)):
            raise NotFoundError("response", response_id)

    async def purge(self) -> None:
        """Deletes what is too old, and the oldest while there is too much."""
        await self._run(self._purge)

    # --- on the thread ---

    async def _run(self, work: Callable[[], T]) -> T:
        from sqlalchemy.exc import SQLAlchemyError

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except SQLAlchemyError as error:
            cause = getattr(error, "orig", None) or error
            raise StoreError(f"the response store failed: {cause}") from error

    def _save(self, tenant: str, stored: StoredResponse) -> None:
        given, response = json.dumps(stored.input), json.dumps(stored.response)  # ASCII: lone surrogates are escaped
        row = {
            "tenant": tenant,
            "id": stored.id,
            "previous_id": stored.previous_id,
            "created_at": stored.created_at,
            "saved_at": self._now(),
            "input": given,
            "response": response,
            "num_bytes": len(given) + len(response),
        }
        self._num_written += len(given) + len(response)
        is_due = self._num_written > self._limits.max_bytes // _PURGES_PER_STORE
        table = self._table
        with self._engine.begin() as connection:
            connection.execute(table.delete().where(table.c.tenant == tenant, table.c.id == stored.id))
            connection.execute(table.insert(), row)
        if is_due:
            self._purge()

    def _chain(self, tenant: str, response_id: str, depth: int, max_bytes: int | None = None) -> list[StoredResponse]:
        """The response and those before it, oldest first, as far as they are there."""
        from sqlalchemy import literal, select

        table = self._table
        first = select(table.c.id, table.c.previous_id, table.c.num_bytes, literal(0).label("depth"))
        chain = first.where(table.c.tenant == tenant, table.c.id == response_id).cte("chain", recursive=True)
        before = select(table.c.id, table.c.previous_id, table.c.num_bytes, (chain.c.depth + 1).label("depth"))
        chain = chain.union_all(
            before.where(table.c.tenant == tenant, table.c.id == chain.c.previous_id, chain.c.depth < depth - 1)
        )
        with self._engine.connect() as connection:
            found = connection.execute(select(chain).order_by(chain.c.depth.desc())).all()
            if max_bytes is not None and (size := sum(row.num_bytes for row in found)) > max_bytes:
                message = f"must be a conversation of at most {max_bytes} bytes (limits.max_message_bytes), has {size}"
                raise InvalidRequestError("previous_response_id", response_id, message)
            return [self._read(connection, tenant, row.id) for row in found]

    def _read(self, connection: "sqlalchemy.Connection", tenant: str, response_id: str) -> StoredResponse:
        table = self._table
        row = connection.execute(table.select().where(table.c.tenant == tenant, table.c.id == response_id)).one()
        return StoredResponse(
            id=row.id,
            created_at=row.created_at,
            previous_id=row.previous_id,
            input=json.loads(row.input),
            response=json.loads(row.response),
        )

    def _delete(self, tenant: str, response_id: str) -> bool:
        table = self._table
        with self._engine.begin() as connection:
            gone = connection.execute(table.delete().where(table.c.tenant == tenant, table.c.id == response_id))
        self._empty_log()
        return bool(gone.rowcount)

    def _purge(self) -> None:
        from sqlalchemy import func, select

        table, self._num_written = self._table, 0
        with self._engine.begin() as connection:
            connection.execute(table.delete().where(table.c.saved_at < self._now() - self._limits.retention_s))
            later = func.sum(table.c.num_bytes).over(order_by=(table.c.saved_at.desc(), table.c.tenant, table.c.id))
            sizes = select(table.c.tenant, table.c.id, later.label("size")).subquery()
            beyond = select(sizes.c.tenant, sizes.c.id).where(sizes.c.size > self._limits.max_bytes)
            for row in connection.execute(beyond).all():
                connection.execute(table.delete().where(table.c.tenant == row.tenant, table.c.id == row.id))
        self._empty_log()

    def _empty_log(self) -> None:
        """What was deleted is in SQLite's write-ahead log no more."""
        if self._engine.dialect.name == "sqlite":
            with self._engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")

"""Object store: objects of the API that outlive the router, in a database, within bounds of size and age.

Responses, chat completions, conversations, files and batches are rows of one table. Each is of one tenant, and owns its
pieces, items and jobs: what deletes it deletes them.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.router.events import StoreFigures
from holdfast.router.store.database import Database
from holdfast.worker.errors import InvalidRequestError, NotFoundError

if TYPE_CHECKING:
    import sqlalchemy

_MAX_ID_LENGTH: Final = 512  # characters

MAX_LISTED: Final = 100  # objects of a page, as in OpenAI's API

HIDDEN: Final = "hidden"
"""Kind of a file that is not whole."""

HELD_BACK: Final = 1e15
"""A lease that does not run out: of jobs whose object is not whole yet."""

_PURGES_PER_STORE: Final = 64
"""A purge follows each time that a 64th of `max_bytes` was written, and each time that a router starts."""


def is_id(text: str) -> bool:
    """Whether anything may have this id; databases refuse some of the other texts."""
    return 0 < len(text) <= _MAX_ID_LENGTH and text.isascii() and text.isprintable()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Limits of a store, for all tenants together."""

    max_bytes: int = 2**30
    """Bytes of objects as JSON, files, and what belongs to them; beyond it the oldest are deleted."""
    retention_s: float = 30 * 86400.0
    """Age at which an object is deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One object of the API, and its source."""

    kind: str
    """Kind in error messages: `response`, `chat completion`, `conversation`, `file`, `batch`."""
    id: str
    object: dict[str, Any]
    """The object in the form that clients get."""
    input: list[dict[str, Any]]
    """Items of its input."""
    parent_id: str | None = None
    """The object that it continues, or belongs to."""
    expires_at: float | None = None
    """Seconds since 1970; None: with its age."""
    num_bytes: int = 0
    """Bytes of all its rows, when it was read; not used when it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Parameters of a list request."""

    after: str | None = None
    limit: int = 20
    is_ascending: bool = False


_FIGURES_LAST_S: Final = 2.0
"""Seconds that figures are given without looking again."""


class ObjectStore:
    """Objects of one router. Methods raise `StoreError` if the database fails."""

    def __init__(self, database: Database, limits: StoreLimits) -> None:
        self.database = database
        self.limits = limits
        self._table = database.tables.objects
        self._num_written = 0
        self._figures: tuple[float, StoreFigures] | None = None

    async def figures(self) -> StoreFigures:
        """Figures that are at most 2 s old."""
        now = time.monotonic()
        if self._figures is None or now - self._figures[0] > _FIGURES_LAST_S:
            self._figures = now, await self.database.run(self._count)
        return self._figures[1]

    async def save(self, tenant: str, stored: StoredObject) -> None:
        """Durably. One of the same id is replaced: the same request was submitted again."""
        await self.database.run(partial(self.insert, tenant=tenant, stored=stored))
        await self.purge_if_due()

    async def get(self, tenant: str, kind: str, object_id: str) -> StoredObject:
        """Raises `NotFoundError`, also for one of another tenant."""
        return await self.database.run(lambda connection: self.read(connection, tenant, kind, object_id))

    async def change(
        self, tenant: str, kind: str, object_id: str, change: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        """The object as `change` makes it. Raises `NotFoundError`."""

        def work(connection: "sqlalchemy.Connection") -> dict[str, Any]:
            changed = change(self.read(connection, tenant, kind, object_id).object)
            self.update(connection, tenant, object_id, changed)
            return changed

        return await self.database.run(work)

    async def listed(
        self, tenant: str, kind: str, page: Page, is_selected: Callable[[dict[str, Any]], bool]
    ) -> tuple[list[dict[str, Any]], bool]:
        """Objects in the order in which they were made, and whether there are more. Raises `InvalidRequestError` for an
        `after` that is not there.
        """
        found: list[dict[str, Any]] = []
        after = page.after
        while len(found) <= page.limit:
            some = await self.database.run(
                partial(self._rows, tenant=tenant, kind=kind, after=after, is_ascending=page.is_ascending)
            )
            if not some:
                break
            after = some[-1][0]
            found += [one for _, one in some if is_selected(one)]
        return found[: page.limit], len(found) > page.limit

    async def delete(self, tenant: str, kind: str, object_id: str) -> None:
        """Deletes for good: the text is overwritten. Raises `NotFoundError`."""
        table = self._table
        mine = (table.c.tenant == tenant, table.c.id == object_id, table.c.kind == kind)
        gone = table.delete().where(*mine)
        if not (await self.database.run(lambda connection: connection.execute(gone).rowcount)):
            raise NotFoundError(kind, object_id)
        await self.database.empty_log()

    async def purge_if_due(self) -> None:
        """Purges once enough was written."""
        if self._num_written > self.limits.max_bytes // _PURGES_PER_STORE:
            await self.purge()

    async def purge(self) -> None:
        """Deletes expired objects, and the oldest ones above the maximum size. What jobs are for is kept."""
        self._num_written = 0
        await self.database.run(self._purge)
        await self.database.empty_log()

    # --- within a transaction ---

    def insert(self, connection: "sqlalchemy.Connection", tenant: str, stored: StoredObject) -> None:
        """Inserts an object, replacing one with its id."""
        table = self._table
        given, shown = json.dumps(stored.input), json.dumps(stored.object)  # ASCII: lone surrogates are escaped
        row = {
            "tenant": tenant,
            "id": stored.id,
            "kind": stored.kind,
            "parent_id": stored.parent_id,
            "saved_at": self.database.now(connection),
            "expires_at": stored.expires_at,
            "input": given,
            "object": shown,
            "num_bytes": len(given) + len(shown),
        }
        connection.execute(table.delete().where(table.c.tenant == tenant, table.c.id == stored.id))
        connection.execute(table.insert(), row)
        self._num_written += len(given) + len(shown)

    def read(self, connection: "sqlalchemy.Connection", tenant: str, kind: str, object_id: str) -> StoredObject:
        """Raises `NotFoundError`."""
        table = self._table
        mine = (table.c.tenant == tenant, table.c.id == object_id, table.c.kind == kind)
        row = connection.execute(table.select().where(*mine)).first()
        if row is None or (row.expires_at is not None and row.expires_at <= self.database.now(connection)):
            raise NotFoundError(kind, object_id)
        return StoredObject(
            kind=row.kind,
            id=row.id,
            parent_id=row.parent_id,
            expires_at=row.expires_at,
            input=json.loads(row.input),
            object=json.loads(row.object),
            num_bytes=row.num_bytes,
        )

    def update(self, connection: "sqlalchemy.Connection", tenant: str, object_id: str, shown: dict[str, Any]) -> None:
        """The object of a row."""
        table, text = self._table, json.dumps(shown)
        found = table.update().where(table.c.tenant == tenant, table.c.id == object_id)
        grown = table.c.num_bytes - _length(table.c.object) + len(text)
        connection.execute(found.values(object=text, num_bytes=grown))
        self._num_written += len(text)

    def grow(self, connection: "sqlalchemy.Connection", tenant: str, object_id: str, num_bytes: int) -> None:
        """Adds bytes to a row; removes them, if negative."""
        table = self._table
        found = table.update().where(table.c.tenant == tenant, table.c.id == object_id)
        connection.execute(found.values(num_bytes=table.c.num_bytes + num_bytes))
        self._num_written += max(0, num_bytes)

    def lock(self, connection: "sqlalchemy.Connection", tenant: str, object_id: str) -> None:
        """Until the transaction's end, other transactions that lock it wait."""
        self.grow(connection, tenant, object_id, 0)

    def touch(self, connection: "sqlalchemy.Connection", tenant: str, object_id: str) -> None:
        """Counts its age from now on."""
        table = self._table
        found = table.update().where(table.c.tenant == tenant, table.c.id == object_id)
        connection.execute(found.values(saved_at=self.database.now(connection)))

    def _count(self, connection: "sqlalchemy.Connection") -> StoreFigures:
        from sqlalchemy import case, func, select

        table, jobs, now = self._table, self.database.tables.jobs, self.database.now(connection)
        counted = select(table.c.kind, func.count().label("count"), func.sum(table.c.num_bytes).label("size"))
        objects = connection.execute(counted.group_by(table.c.kind)).all()
        kind = case((jobs.c.number.is_(None), "response"), else_="line")
        state = case((jobs.c.lease_until < now, "waiting"), else_="running")
        begun = select(kind, state, func.count(), func.min(jobs.c.made_at)).where(jobs.c.lease_until < HELD_BACK)
        found = [tuple(row) for row in connection.execute(begun.group_by(kind, state)).all()]
        return StoreFigures(
            num_bytes=sum(int(row.size) for row in objects),
            max_bytes=self.limits.max_bytes,
            num_objects={row.kind: int(row[1]) for row in objects},
            num_jobs={(kind, state): count for kind, state, count, _ in found},
            oldest_job_s=max(0.0, now - min((first for *_, first in found), default=now)),
        )

    def _rows(
        self, connection: "sqlalchemy.Connection", tenant: str, kind: str, after: str | None, is_ascending: bool
    ) -> list[tuple[str, dict[str, Any]]]:
        from sqlalchemy import or_, tuple_

        table, now = self._table, self.database.now(connection)
        place = tuple_(table.c.saved_at, table.c.id)
        asked = table.select().where(table.c.tenant == tenant, table.c.kind == kind)
        asked = asked.where(or_(table.c.expires_at.is_(None), table.c.expires_at > now))
        if after is not None:
            at = connection.execute(
                table.select().where(table.c.tenant == tenant, table.c.kind == kind, table.c.id == after)
            ).first()
            if at is None:
                raise InvalidRequestError("after", after, f"must be the id of a {kind} that is stored")
            last = tuple_(at.saved_at, at.id)
            asked = asked.where(place > last if is_ascending else place < last)
        order = (table.c.saved_at, table.c.id) if is_ascending else (table.c.saved_at.desc(), table.c.id.desc())
        found = connection.execute(asked.order_by(*order).limit(MAX_LISTED)).all()
        return [(row.id, json.loads(row.object)) for row in found]

    def _purge(self, connection: "sqlalchemy.Connection") -> None:
        from sqlalchemy import and_, exists, func, or_, select

        table, jobs, now = self._table, self.database.tables.jobs, self.database.now(connection)
        is_old = table.c.saved_at < now - self.limits.retention_s
        connection.execute(table.delete().where(or_(is_old, table.c.expires_at <= now)))
        later = func.sum(table.c.num_bytes).over(order_by=(table.c.saved_at.desc(), table.c.tenant, table.c.id))
        sizes = select(table.c.tenant, table.c.id, table.c.parent_id, later.label("size")).subquery()
        is_for_it = or_(jobs.c.object_id == sizes.c.id, jobs.c.object_id == sizes.c.parent_id)
        is_needed = exists().where(and_(jobs.c.tenant == sizes.c.tenant, is_for_it))
        beyond = select(sizes.c.tenant, sizes.c.id).where(sizes.c.size > self.limits.max_bytes, ~is_needed)
        for row in connection.execute(beyond).all():
            connection.execute(table.delete().where(table.c.tenant == row.tenant, table.c.id == row.id))


def _length(column: "sqlalchemy.Column[str]") -> Any:
    from sqlalchemy import func

    return func.length(column)

"""Database of the stores: opening SQLite and PostgreSQL, the tables, and the thread that calls them."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from holdfast.worker.errors import StoreError

if TYPE_CHECKING:
    import sqlalchemy

T = TypeVar("T")

FILE: Final = "store.sqlite"
"""Below the folder of the setting."""

_LOCK_WAIT_S: Final = 10.0
"""Seconds that a router waits for another router's write."""


@dataclass(frozen=True, slots=True)
class Tables:
    """All have the tenant and an object's id; the row of an object owns those of the others."""

    objects: "sqlalchemy.Table"
    pieces: "sqlalchemy.Table"
    """Bytes of an object, in order: a background response's stream, a file's content."""
    items: "sqlalchemy.Table"
    """Items of a conversation, in order."""
    jobs: "sqlalchemy.Table"
    """Work to be done for an object."""


class Database:
    """Used from one event loop. `run` and the methods of its users raise `StoreError` where it fails."""

    def __init__(self, place: str, now: Callable[[], float] | None = None) -> None:
        """Opens a folder, which is made, or a `postgresql://` URL. `now`: seconds since 1970; unset, it is the clock of
        the PostgreSQL server, or of this host. Raises `StoreError`.
        """
        import sqlalchemy
        from sqlalchemy.exc import SQLAlchemyError

        metadata = sqlalchemy.MetaData()
        self.tables = Tables(_objects(metadata), _pieces(metadata), _items(metadata), _jobs(metadata))
        self._now = now
        try:
            self.engine = _postgresql(place) if "://" in place else _sqlite(Path(place))
            with self.engine.begin() as connection:
                metadata.create_all(connection)
        except (OSError, SQLAlchemyError) as error:
            cause = getattr(error, "orig", None) or error
            raise StoreError(f"router.store = {place!r} cannot be opened: {cause}") from error
        self._thread = ThreadPoolExecutor(1, "store")

    @classmethod
    async def open(cls, place: str, now: Callable[[], float] | None = None) -> Self:
        """Off the event loop."""
        return await asyncio.to_thread(cls, place, now)

    def now(self, connection: "sqlalchemy.Connection") -> float:
        """Seconds since 1970, the same for all routers of the store: hosts that share one may have other clocks."""
        if self._now is not None:
            return self._now()
        if self.engine.dialect.name == "sqlite":
            return time.time()
        return float(connection.exec_driver_sql("SELECT extract(epoch FROM clock_timestamp())").scalar_one())

    async def run(self, work: Callable[["sqlalchemy.Connection"], T]) -> T:
        """Does all of it, or nothing, and durably."""
        from sqlalchemy.exc import SQLAlchemyError

        def transaction() -> T:
            with self.engine.begin() as connection:
                return work(connection)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)
        except SQLAlchemyError as error:
            cause = getattr(error, "orig", None) or error
            raise StoreError(f"the store failed: {cause}") from error

    async def empty_log(self) -> None:
        """Removes deleted content from SQLite's write-ahead log."""
        if self.engine.dialect.name != "sqlite":
            return

        def truncate() -> None:
            connection = self.engine.raw_connection()  # a checkpoint is no part of a transaction
            try:
                connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                connection.close()

        await asyncio.get_running_loop().run_in_executor(self._thread, truncate)

    async def close(self) -> None:
        """Closes the database after running writes have ended."""
        await asyncio.to_thread(self._thread.shutdown)
        self.engine.dispose()


def _objects(metadata: "sqlalchemy.MetaData") -> "sqlalchemy.Table":
    from sqlalchemy import BigInteger, Column, Float, Index, Table, Text

    table = Table(
        "holdfast_objects",
        metadata,
        Column("tenant", Text, primary_key=True),
        Column("id", Text, primary_key=True),
        Column("kind", Text, nullable=False),
        Column("parent_id", Text),
        Column("saved_at", Float, nullable=False),
        Column("expires_at", Float, index=True),
        Column("num_bytes", BigInteger, nullable=False),
        Column("input", Text, nullable=False),
        Column("object", Text, nullable=False),
    )
    Index("holdfast_objects_by_age", table.c.saved_at)
    Index("holdfast_objects_by_kind", table.c.tenant, table.c.kind, table.c.saved_at, table.c.id)
    return table


def _pieces(metadata: "sqlalchemy.MetaData") -> "sqlalchemy.Table":
    from sqlalchemy import Column, Integer, LargeBinary, Table

    return Table(
        "holdfast_pieces",
        metadata,
        *_of_object("id", primary_key=True),
        Column("number", Integer, primary_key=True, autoincrement=False),
        Column("data", LargeBinary, nullable=False),
    )


def _items(metadata: "sqlalchemy.MetaData") -> "sqlalchemy.Table":
    from sqlalchemy import BigInteger, Column, Index, Table, Text

    table = Table(
        "holdfast_items",
        metadata,
        *_of_object("conversation_id", primary_key=True),
        Column("number", BigInteger, primary_key=True, autoincrement=False),
        Column("id", Text, nullable=False),
        Column("data", Text, nullable=False),
    )
    Index("holdfast_items_by_id", table.c.tenant, table.c.conversation_id, table.c.id, unique=True)
    return table


def _jobs(metadata: "sqlalchemy.MetaData") -> "sqlalchemy.Table":
    from sqlalchemy import Column, Float, Index, Integer, LargeBinary, Table, Text

    table = Table(
        "holdfast_jobs",
        metadata,
        *_of_object("object_id", primary_key=False),
        Column("id", Text, primary_key=True),
        Column("number", Integer),
        Column("content", LargeBinary, nullable=False),
        Column("identity", Text, nullable=False),
        Column("key_name", Text, nullable=False),
        Column("num_claims", Integer, nullable=False),
        Column("owner", Text, nullable=False),
        Column("lease_until", Float, nullable=False),
        Column("made_at", Float, nullable=False),
    )
    Index("holdfast_jobs_by_object", table.c.tenant, table.c.object_id)
    Index("holdfast_jobs_by_lease", table.c.lease_until)
    Index("holdfast_jobs_by_owner", table.c.owner)
    return table


def _of_object(name: str, *, primary_key: bool) -> "list[Any]":
    """Columns of the object that a row belongs to; `name` is that of its id."""
    from sqlalchemy import Column, ForeignKeyConstraint, Text

    columns = [Column("tenant", Text, primary_key=True), Column(name, Text, primary_key=primary_key, nullable=False)]
    owner = [f"holdfast_objects.{column}" for column in ("tenant", "id")]
    return [*columns, ForeignKeyConstraint(["tenant", name], owner, ondelete="CASCADE")]


def _sqlite(folder: Path) -> "sqlalchemy.Engine":
    from sqlalchemy import create_engine, event

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / FILE
    file.touch(mode=0o600)
    engine = create_engine(f"sqlite:///{file}", connect_args={"timeout": _LOCK_WAIT_S, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        connection.isolation_level = None  # transactions begin as below, and not at the first write
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: "sqlalchemy.Connection") -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # a transaction that reads first would fail where it then writes

    return engine


def _postgresql(url: str) -> "sqlalchemy.Engine":
    from sqlalchemy import create_engine

    try:
        import psycopg  # noqa: F401  the driver, which create_engine would miss with a riddle
    except ImportError as error:
        raise StoreError(f"router.store = {url!r} needs psycopg: pip install 'holdfast[postgresql]'") from error
    return create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1), pool_pre_ping=True)

"""Database of stored responses: how SQLite and PostgreSQL are opened, the tables, and the thread that calls them."""

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

FILE: Final = "responses.sqlite"
"""Below the folder of the setting."""

_LOCK_WAIT_S: Final = 10.0
"""How long a router waits for another one that writes."""


@dataclass(frozen=True, slots=True)
class Tables:
    """All have the tenant and the response's id; the row of a response owns those of the others."""

    responses: "sqlalchemy.Table"
    jobs: "sqlalchemy.Table"
    """Of background responses that are not over."""
    pieces: "sqlalchemy.Table"
    """Of their streams, in order."""


class Database:
    """Used from one event loop. `run` and the methods of its users raise `StoreError` where it fails."""

    def __init__(self, place: str, now: Callable[[], float] = time.time) -> None:
        """At a folder, which is made, or at a `postgresql://` URL. Raises `StoreError`."""
        import sqlalchemy
        from sqlalchemy.exc import SQLAlchemyError

        metadata = sqlalchemy.MetaData()
        self.tables = Tables(_responses(metadata), _jobs(metadata), _pieces(metadata))
        self.now = now
        """Seconds since 1970."""
        try:
            self.engine = _postgresql(place) if "://" in place else _sqlite(Path(place))
            with self.engine.begin() as connection:
                metadata.create_all(connection)
        except (OSError, SQLAlchemyError) as error:
            cause = getattr(error, "orig", None) or error
            raise StoreError(f"router.store = {place!r} cannot be opened: {cause}") from error
        self._thread = ThreadPoolExecutor(1, "response store")

    @classmethod
    async def open(cls, place: str, now: Callable[[], float] = time.time) -> Self:
        """Off the event loop."""
        return await asyncio.to_thread(cls, place, now)

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
            raise StoreError(f"the response store failed: {cause}") from error

    async def empty_log(self) -> None:
        """What was deleted is in SQLite's write-ahead log no more."""
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
        """What is being written is written to its end."""
        await asyncio.to_thread(self._thread.shutdown)
        self.engine.dispose()


def _responses(metadata: "sqlalchemy.MetaData") -> "sqlalchemy.Table":
    from sqlalchemy import BigInteger, Column, Float, Index, Table, Text

    table = Table(
        "holdfast_responses",
        metadata,
        Column("tenant", Text, primary_key=True),
        Column("id", Text, primary_key=True),
        Column("previous_id", Text),
        Column("created_at", BigInteger, nullable=False),
        Column("saved_at", Float, nullable=False),
        Column("num_bytes", BigInteger, nullable=False),
        Column("input", Text, nullable=False),
        Column("response", Text, nullable=False),
    )
    Index("holdfast_responses_by_age", table.c.saved_at)
    return table


def _jobs(metadata: "sqlalchemy.MetaData") -> "sqlalchemy.Table":
    from sqlalchemy import Column, Float, Integer, LargeBinary, Table, Text

    return Table(
        "holdfast_background_jobs",
        metadata,
        *_of_response(),
        Column("content", LargeBinary, nullable=False),
        Column("identity", Text, nullable=False),
        Column("num_claims", Integer, nullable=False),
        Column("owner", Text, nullable=False),
        Column("lease_until", Float, nullable=False, index=True),
    )


def _pieces(metadata: "sqlalchemy.MetaData") -> "sqlalchemy.Table":
    from sqlalchemy import Column, Integer, LargeBinary, Table

    return Table(
        "holdfast_background_pieces",
        metadata,
        *_of_response(),
        Column("number", Integer, primary_key=True, autoincrement=False),
        Column("data", LargeBinary, nullable=False),
    )


def _of_response() -> "list[Any]":
    from sqlalchemy import Column, ForeignKeyConstraint, Text

    owner = [f"holdfast_responses.{name}" for name in ("tenant", "id")]
    return [
        Column("tenant", Text, primary_key=True),
        Column("id", Text, primary_key=True),
        ForeignKeyConstraint(["tenant", "id"], owner, ondelete="CASCADE"),
    ]


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
        raise StoreError(f"router.store = {url!r} asks for psycopg: pip install 'holdfast[postgresql]'") from error
    return create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1), pool_pre_ping=True)

"""Database of the response store: how SQLite and PostgreSQL are opened, and the table."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast.worker.errors import StoreError

if TYPE_CHECKING:
    import sqlalchemy

FILE: Final = "responses.sqlite"
"""Below the folder of the setting."""

_LOCK_WAIT_S: Final = 10.0
"""How long a router waits for another one that writes."""


def is_url(place: str) -> bool:
    return "://" in place


def opened(place: str) -> "tuple[sqlalchemy.Engine, sqlalchemy.Table]":
    """The database, with the table in it. Raises `StoreError`."""
    import sqlalchemy
    from sqlalchemy.exc import SQLAlchemyError

    metadata = sqlalchemy.MetaData()
    table = _table(metadata)
    try:
        engine = _postgresql(place) if is_url(place) else _sqlite(Path(place))
        with engine.begin() as connection:
            metadata.create_all(connection)
    except (OSError, SQLAlchemyError) as error:
        cause = getattr(error, "orig", None) or error
        raise StoreError(f"router.store = {place!r} cannot be opened: {cause}") from error
    return engine, table


def _table(metadata: "sqlalchemy.MetaData") -> "sqlalchemy.Table":
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


def _sqlite(folder: Path) -> "sqlalchemy.Engine":
    from sqlalchemy import create_engine, event

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / FILE
    file.touch(mode=0o600)
    engine = create_engine(f"sqlite:///{file}", connect_args={"timeout": _LOCK_WAIT_S, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON"):
            connection.execute(f"PRAGMA {pragma}")

    return engine


def _postgresql(url: str) -> "sqlalchemy.Engine":
    from sqlalchemy import create_engine

    try:
        import psycopg  # noqa: F401  the driver, which create_engine would miss with a riddle
    except ImportError as error:
        raise StoreError(f"router.store = {url!r} asks for psycopg: pip install 'holdfast[postgresql]'") from error
    return create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1), pool_pre_ping=True)

"""Index of a block store, in SQLite: where each block is, and the names of blocks that requests have asked to keep.

A kept name has a tenant and an expiry time; its block may be stored later. When a segment is deleted, its kept blocks
move to another segment, within a share of the store for each tenant: above the share, the least recently kept are
dropped. Times are of the wall clock, because the store outlives its host.
"""

import logging
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.worker.cache.sealing import KIND_BYTES

logger = logging.getLogger(__name__)

SUFFIX: Final = ".blocks"
"""End of the names of segments."""
_INDEX: Final = "index.sqlite"
_LOCK_WAIT_S: Final = 2.0
_MAX_TRIES: Final = 100  # attempts to open an index that another process is opening
_CACHE_KIB: Final = 4096

_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS segments (id INTEGER PRIMARY KEY AUTOINCREMENT, file TEXT, used INTEGER)",
    "CREATE TABLE IF NOT EXISTS blocks (number INTEGER PRIMARY KEY AUTOINCREMENT, kind BLOB, name BLOB, "
    "segment INTEGER, offset INTEGER, length INTEGER, UNIQUE (kind, name))",
    "CREATE INDEX IF NOT EXISTS by_segment ON blocks (segment)",
    "CREATE TABLE IF NOT EXISTS kept (kind BLOB, name BLOB, tenant BLOB, until REAL, turn INTEGER, place INTEGER, "
    "PRIMARY KEY (kind, name)) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS by_end ON kept (until)",
    "CREATE TABLE IF NOT EXISTS tenants (tenant BLOB PRIMARY KEY, name BLOB) WITHOUT ROWID",
)

_STORED: Final = "kept JOIN blocks ON blocks.kind = kept.kind AND blocks.name = kept.name"


def open_index(folder: Path) -> sqlite3.Connection:
    """Opens the index; a damaged one is replaced by an empty one."""
    try:
        return _connected(folder)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise  # locked, or the disk fails: that says nothing against the index
        logger.warning("the block store in %s is damaged, and starts empty: %s", folder, error)
        for path in [*folder.glob(f"{_INDEX}*"), *folder.glob(f"*{SUFFIX}")]:
            path.unlink(missing_ok=True)
        return _connected(folder)


def _connected(folder: Path) -> sqlite3.Connection:
    for _ in range(_MAX_TRIES - 1):
        try:
            return _opened(folder)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
        # where two processes begin a write-ahead log SQLite does not wait; for a transaction it does
        with closing(_database(folder)) as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute("ROLLBACK")
    return _opened(folder)


def _database(folder: Path) -> sqlite3.Connection:
    return sqlite3.connect(folder / _INDEX, isolation_level=None, timeout=_LOCK_WAIT_S, check_same_thread=False)


def _opened(folder: Path) -> sqlite3.Connection:
    db = _database(folder)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")  # a host that crashes loses the last blocks, never the index
        db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        for statement in _SCHEMA:
            db.execute(statement)
        known = {file for (file,) in db.execute("SELECT file FROM segments")}
    except BaseException:
        db.close()
        raise
    for path in folder.glob(f"*{SUFFIX}"):
        if path.name not in known:  # a segment is in the index before its file is made
            path.unlink(missing_ok=True)
    return db


class KeptBlock(NamedTuple):
    """A stored block that is kept: where it is in its segment."""

    kind: bytes
    name: bytes
    offset: int
    length: int


class KeptPrefix(NamedTuple):
    """A stored prefix that is kept: its last stored block."""

    tenant: bytes
    tenant_name: bytes
    """Name in the request."""
    name: bytes
    num_before: int
    """Names of the prefix before that one."""
    until: float


class KeptNames:
    """The table of one index. The writer holds the index's transaction. Raises what SQLite raises."""

    def __init__(self, db: sqlite3.Connection, most_bytes: int, clock: Callable[[], float]) -> None:
        """`most_bytes`: of one tenant."""
        self._db = db
        self._most_bytes = most_bytes
        self._clock = clock

    def keep(self, kind: bytes, names: Sequence[bytes], tenant: bytes, ttl_s: float, tenant_name: bytes) -> None:
        """Keeps these names, in the order of the prefix, for this number of seconds. A longer expiry time stays.
        `tenant_name`: for `prefixes`.
        """
        self._db.execute("DELETE FROM kept WHERE until <= ?", (self._clock(),))
        self._db.execute("INSERT OR IGNORE INTO tenants VALUES (?, ?)", (tenant, tenant_name))
        ((turn,),) = self._db.execute("SELECT coalesce(max(turn), 0) + 1 FROM kept").fetchall()
        until = self._clock() + ttl_s
        self._db.executemany(
            "INSERT INTO kept VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (kind, name) DO UPDATE SET "
            "until = max(until, excluded.until), turn = excluded.turn, place = excluded.place",
            [(kind, name, tenant, until, turn, place) for place, name in enumerate(names)],
        )

    def forget(self, kind: bytes, names: Sequence[bytes], tenant: bytes) -> None:
        """Keeps these names of a tenant no longer; without names, none of the tenant's."""
        if names:
            rows = [(kind, tenant, name) for name in names]
            self._db.executemany("DELETE FROM kept WHERE kind = ? AND tenant = ? AND name = ?", rows)
        else:
            self._db.execute("DELETE FROM kept WHERE kind = ? AND tenant = ?", (kind, tenant))
        self._forget_tenants()

    def forget_prefix(self, kind: bytes, name: bytes, tenant: bytes) -> None:
        """Keeps the prefix of a tenant that ends with this name no longer, nor names of other kinds of block behind it;
        its beginning as long as a continuation that was kept with it, or later.
        """
        found = self._db.execute(
            "SELECT turn, place, until FROM kept WHERE kind = ? AND name = ? AND tenant = ?", (kind, name, tenant)
        ).fetchone()
        if found is None:
            return
        turn, place, until = found
        prefix, is_part = (kind, tenant, turn, until), "kind = ? AND tenant = ? AND turn = ? AND until <= ?"
        ((after,),) = self._db.execute(
            "SELECT max(until) FROM kept WHERE kind = ? AND tenant = ? AND turn = ? AND place > ? AND "
            "substr(name, 1, ?) = ?",
            (kind, tenant, turn, place, KIND_BYTES, name[:KIND_BYTES]),
        ).fetchall()
        if after is None:
            self._db.execute(f"DELETE FROM kept WHERE {is_part}", prefix)
            self._forget_tenants()
        else:
            self._db.execute(
                f"UPDATE kept SET until = min(until, ?) WHERE {is_part} AND place <= ?", (after, *prefix, place)
            )

    def prefixes(self, kind: bytes, of_names: bytes) -> list[KeptPrefix]:
        """The stored prefixes of names that begin with `of_names`, except beginnings of a longer one that is kept with
        them for as long.
        """
        rows = self._db.execute(
            f"SELECT turn, kept.tenant, tenants.name, kept.name, place, until FROM {_STORED} "
            "JOIN tenants ON tenants.tenant = kept.tenant WHERE kept.kind = ? AND substr(kept.name, 1, ?) = ? AND "
            "until > ? ORDER BY kept.tenant, turn, place DESC",
            (kind, len(of_names), of_names, self._clock()),
        ).fetchall()
        found, longest = [], dict[tuple[bytes, int], float]()
        for turn, *row in rows:
            one = KeptPrefix(*row)
            if one.until > longest.get((one.tenant, turn), 0.0):
                longest[one.tenant, turn] = one.until
                found.append(one)
        return found

    def end(self) -> None:
        """Forgets names whose time is up, and those beyond their tenant's share."""
        self._db.execute("DELETE FROM kept WHERE until <= ?", (self._clock(),))
        rows = self._db.execute(
            f"SELECT kept.tenant, sum(length) FROM {_STORED} GROUP BY kept.tenant HAVING sum(length) > ?",
            (self._most_bytes,),
        ).fetchall()
        for tenant, num_bytes in rows:
            self._drop(tenant, num_bytes - self._most_bytes)
        self._forget_tenants()

    def sizes(self) -> dict[int, int]:
        """Bytes of kept blocks by segment."""
        return dict(self._db.execute(f"SELECT segment, sum(length) FROM {_STORED} GROUP BY segment").fetchall())

    def of_segment(self, segment: int) -> list[KeptBlock]:
        """The kept blocks of a segment."""
        found = self._db.execute(
            f"SELECT blocks.kind, blocks.name, offset, length FROM {_STORED} WHERE segment = ? ORDER BY offset",
            (segment,),
        )
        return [KeptBlock(*row) for row in found]

    def _forget_tenants(self) -> None:
        self._db.execute("DELETE FROM tenants WHERE tenant NOT IN (SELECT tenant FROM kept)")

    def _drop(self, tenant: bytes, num_bytes: int) -> None:
        """Drops kept names of a tenant until this number of bytes is freed: of names kept together the last first."""
        found = self._db.execute(
            f"SELECT kept.kind, kept.name, length FROM {_STORED} WHERE tenant = ? ORDER BY turn, place DESC", (tenant,)
        ).fetchall()
        dropped = []
        for kind, name, length in found:
            if num_bytes <= 0:
                break
            num_bytes -= length
            dropped.append((kind, name))
        self._db.executemany("DELETE FROM kept WHERE kind = ? AND name = ?", dropped)

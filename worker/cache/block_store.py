"""Block store on disk: blocks of keys and values, and snapshots of states, by name, for all replicas of a host.

Segment files that are only appended to hold the blocks; an index in SQLite says where each is. A block counts once the
index has it, and its digest is checked whenever it is read. So a process may be killed at any write, and a host may
lose data that it had not written yet: an incomplete record is not found. Segments are deleted whole, the one first that
was used least recently. Names belong to one `kind`: the blocks of two kinds are never confused.
"""

import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from holdfast.worker.block_hash import HASH_BYTES
from holdfast.worker.cache.block_index import SUFFIX, KeptNames, KeptPrefix, open_index
from holdfast.worker.cache.sealing import KIND_BYTES, Sealer, WrongDigestError
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.request import StoredPin

logger = logging.getLogger(__name__)

T = TypeVar("T")
Record = Sequence[memoryview | bytes]

SEGMENTS: Final = 16
"""Approximate number of segments of a full store; one segment is deleted at a time."""
LARGEST_SEGMENT: Final = 256 << 20  # bytes
_TENANT: Final = b"t"
_NOWHERE: Final = 0
"""No segment has this number."""


class _Segment(NamedTuple):
    """The segment that this process appends to."""

    id: int
    file: int


class BlockStore:
    """One kind of blocks in a folder. Used by one thread at a time; several processes may use one folder.

    An error of the disk raises OSError; then nothing has changed.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        kind: bytes,
        sealer: Sealer | None = None,
        *,
        clock: Callable[[], float],
        kept_share: float = 0.25,
    ) -> None:
        """Opens or makes the store. `max_bytes` bounds all kinds together. `sealer` checks and may encrypt blocks.
        `clock`: seconds, of a clock that goes on when the host restarts. `kept_share`: share of `max_bytes` that the
        kept blocks of one tenant may take.

        Raises `ConfigurationError` where the folder cannot be used.
        """
        self._folder, self._clock = folder, clock
        self._most_kept_bytes = int(kept_share * max_bytes)
        self._max_bytes = max_bytes
        self._segment_bytes = min(LARGEST_SEGMENT, max_bytes // SEGMENTS)
        self.sealer = sealer or Sealer()
        self._kind = blake2b(kind + self.sealer.kind, digest_size=16).digest()
        self._open_files: dict[int, int] = {}  # to be read, by segment
        self._used: set[int] = set()  # segments that were read since the index was updated
        self._segment: _Segment | None = None
        self._end = 0  # of the segment that is appended to
        self._places: dict[bytes, int] = {}  # the segment of each block, as far as is known here
        self._last_number = 0
        self._version = -1
        self.num_failures = 0
        """Blocks whose digest was wrong."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
            if found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise ConfigurationError(f"cache.kv_offload_disk: {folder} can be written to by other users")
            self._use(open_index(folder))
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(f"cache.kv_offload_disk: {folder} cannot be used: {error}") from error

    def close(self) -> None:
        """Closes all files. Stored blocks are kept."""
        for file in [*self._open_files.values(), *([self._segment.file] if self._segment else [])]:
            os.close(file)
        self._open_files.clear()
        self._segment = None
        self._db.close()

    # --- blocks ---

    def put(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """Writes blocks by name, except the ones that are stored already. Returns the number written."""
        return self._guarded(lambda: self._put(blocks))

    def get(self, name: bytes) -> memoryview | None:
        """Content of a block; None if it is missing, or if its digest is wrong: then it is dropped."""
        return self._guarded(lambda: self._get(name))

    def drop(self, name: bytes) -> None:
        """Forgets a block."""
        self._guarded(lambda: self._drop(name))

    def keep(self, names: Sequence[bytes], tenant: str, ttl_s: float) -> None:
        """Keeps these blocks, given from a prefix's beginning and stored now or later, for this number of seconds,
        within the tenant's share: they outlive blocks that were used later. 0: they are kept no longer; without names,
        none of the tenant's are. Below 0: the prefixes that end with these names are kept no longer.
        """
        self._guarded(lambda: self._keep(names, tenant, ttl_s))

    def kept_prefixes(self, kind: bytes) -> list[StoredPin]:
        """Prefixes that are kept here, of blocks whose names begin with `kind`, as far as they are stored."""
        return self._guarded(lambda: [self._stored_pin(one) for one in self._kept.prefixes(self._kind, kind)])

    def news(self) -> tuple[list[bytes], list[bytes]]:
        """Names added since the last call, by any process, and names removed."""
        return self._guarded(self._news)

    @property
    def num_blocks(self) -> int:
        """Blocks of this kind at the last `news`."""
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        """Bytes of all kinds' segments on the disk."""
        return sum(self._sizes().values())

    # --- internals ---

    def _guarded(self, action: Callable[[], T]) -> T:
        """Errors of SQLite as OSError. A damaged index is replaced by an empty one."""
        try:
            return action()
        except sqlite3.Error as error:
            if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
                self._begin_anew()
            raise OSError(f"the index of the block store in {self._folder}: {error}") from error

    def _begin_anew(self) -> None:
        with suppress(sqlite3.Error):
            self._db.close()
        self._leave_segment()
        while self._open_files:
            os.close(self._open_files.popitem()[1])
        self._used.clear()
        self._version, self._last_number = -1, 0
        self._places = dict.fromkeys(self._places, _NOWHERE)  # the next `news` says that they have gone
        self._use(open_index(self._folder))

    def _use(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._kept = KeptNames(db, self._most_kept_bytes, self._clock)

    def _keep(self, names: Sequence[bytes], tenant: str, ttl_s: float) -> None:
        digest = blake2b(tenant.encode(errors="surrogatepass"), digest_size=HASH_BYTES).digest()
        (hidden_tenant,) = self.sealer.hidden([_TENANT + digest])
        with self._transaction():
            hidden = self.sealer.hidden(names)
            if ttl_s > 0:
                sealed = self.sealer.seal(_TENANT, memoryview(tenant.encode(errors="surrogatepass")))
                self._kept.keep(self._kind, hidden, hidden_tenant, ttl_s, b"".join(sealed))
            elif ttl_s == 0:
                self._kept.forget(self._kind, hidden, hidden_tenant)
            else:
                for name in hidden:
                    self._kept.forget_prefix(self._kind, name, hidden_tenant)

    def _stored_pin(self, one: KeptPrefix) -> StoredPin:
        try:
            tenant = str(self.sealer.unseal(_TENANT, memoryview(one.tenant_name)), errors="surrogatepass")
        except WrongDigestError:
            tenant = "?"
        (name,) = self.sealer.shown([one.name])
        return StoredPin(tenant, one.until - self._clock(), name[KIND_BYTES:], one.num_before + 1)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def _put(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        names = self.sealer.hidden([name for name, _ in blocks])
        new = [(name, data) for name, (_, data) in zip(names, blocks, strict=True) if self._place(name) is None]
        if not new:
            return 0
        records = [self.sealer.seal(name, data) for name, data in new]
        self._make_room(sum(len(part) for record in records for part in record))
        self._append([(self._kind, name) for name, _ in new], records)
        return len(new)

    def _append(self, names: Sequence[tuple[bytes, bytes]], records: Sequence[Record]) -> None:
        """Appends records to this process's segment, each by its kind and name."""
        segment = self._own_segment()
        lengths = [sum(len(part) for part in record) for record in records]
        offsets = [self._end + sum(lengths[:number]) for number in range(len(lengths))]
        try:
            for record, offset in zip(records, offsets, strict=True):
                _write(segment.file, record, offset)
            rows = [
                (*name, segment.id, offset, length)
                for name, offset, length in zip(names, offsets, lengths, strict=True)
            ]
            with self._transaction():
                if not self._touch([segment.id]):
                    raise FileNotFoundError("another process has deleted the segment")
                self._db.executemany(
                    "INSERT OR REPLACE INTO blocks (kind, name, segment, offset, length) VALUES (?, ?, ?, ?, ?)", rows
                )
        except BaseException:
            self._leave_segment()
            raise
        self._end = offsets[-1] + lengths[-1]
        if self._end >= self._segment_bytes:
            self._leave_segment()

    def _get(self, name: bytes) -> memoryview | None:
        (hidden,) = self.sealer.hidden([name])
        place = self._place(hidden)
        if place is None:
            return None
        segment, offset, length = place
        try:
            record = os.pread(self._file(segment), length, offset)
            data = self.sealer.unseal(hidden, memoryview(record))
        except FileNotFoundError:  # deleted meanwhile
            return None
        except WrongDigestError:
            self.num_failures += 1
            logger.warning("a block in %s has a wrong digest, and is computed again", self._folder)
            self._drop(name)
            return None
        self._used.add(segment)
        return data

    def _drop(self, name: bytes) -> None:
        with self._transaction():
            self._db.execute(
                "DELETE FROM blocks WHERE kind = ? AND name = ?", (self._kind, *self.sealer.hidden([name]))
            )
        self._places.pop(name, None)

    def _place(self, hidden: bytes) -> tuple[int, int, int] | None:
        """Segment, offset and length of a block."""
        found: tuple[int, int, int] | None = self._db.execute(
            "SELECT segment, offset, length FROM blocks WHERE kind = ? AND name = ?", (self._kind, hidden)
        ).fetchone()
        return found

    def _news(self) -> tuple[list[bytes], list[bytes]]:
        if self._used:
            used, self._used = self._used, set()
            with self._transaction():
                self._touch(sorted(used))
        ((version,),) = self._db.execute("PRAGMA data_version").fetchall()
        rows = self._db.execute(
            "SELECT number, name, segment FROM blocks WHERE kind = ? AND number > ? ORDER BY number",
            (self._kind, self._last_number),
        ).fetchall()
        names = self.sealer.shown([name for _, name, _ in rows])
        came = [name for name in names if name not in self._places]
        self._places.update(zip(names, (segment for _, _, segment in rows), strict=True))
        self._last_number = rows[-1][0] if rows else self._last_number
        if version == self._version:
            return came, []
        self._version = version
        return came, self._forget_gone()

    def _forget_gone(self) -> list[bytes]:
        """Forgets the blocks of deleted segments."""
        there = {segment for (segment,) in self._db.execute("SELECT id FROM segments")}
        gone = [name for name, segment in self._places.items() if segment not in there]
        for name in gone:
            del self._places[name]
        for segment in self._open_files.keys() - there:
            os.close(self._open_files.pop(segment))
        return gone

    # --- segments ---

    def _touch(self, segments: Sequence[int]) -> bool:
        """These were used last of all. False if one of them is not there."""
        ((latest,),) = self._db.execute("SELECT coalesce(max(used), 0) FROM segments").fetchall()
        found = [
            self._db.execute("UPDATE segments SET used = ? WHERE id = ?", (latest + 1, segment)).rowcount
            for segment in segments
        ]
        return all(found)

    def _sizes(self) -> dict[str, int]:
        sizes = {}
        for entry in os.scandir(self._folder):
            with suppress(FileNotFoundError):
                sizes[entry.name] = entry.stat().st_size
        return sizes

    def _make_room(self, num_bytes: int) -> None:
        """Deletes segments until this number of bytes fits."""
        sizes = self._sizes()
        total = sum(sizes.values())
        if total + num_bytes <= self._max_bytes:
            return
        self._version = -1
        with self._transaction():
            self._kept.end()
        kept = self._kept.sizes()
        segments = self._db.execute("SELECT id, file FROM segments ORDER BY used, id").fetchall()
        for segment, file in sorted(segments, key=lambda one: 2 * kept.get(one[0], 0) > sizes.get(one[1], 0)):
            moved = self._move_kept(segment) if 2 * kept.get(segment, 0) <= sizes.get(file, 0) else 0
            self._delete(segment, file)
            total += moved - sizes.get(file, 0)
            if total + num_bytes <= self._max_bytes:
                break
        else:
            raise OSError(f"{num_bytes} bytes do not fit into the block store's {self._max_bytes}")

    def _move_kept(self, segment: int) -> int:
        """Moves the kept blocks of a segment to the current one; returns the number of bytes. They are at most half of
        it, and lost where the disk fails.
        """
        if self._segment is not None and self._segment.id == segment:
            self._leave_segment()
        blocks = self._kept.of_segment(segment)
        if not blocks:
            return 0
        try:
            records = [[os.pread(self._file(segment), one.length, one.offset)] for one in blocks]
            self._append([(one.kind, one.name) for one in blocks], records)
        except OSError as error:
            logger.warning("blocks in %s that were to be kept are lost: %s", self._folder, error)
            return 0
        return sum(one.length for one in blocks)

    def _delete(self, segment: int, file: str) -> None:
        with self._transaction():
            self._db.execute("DELETE FROM blocks WHERE segment = ?", (segment,))
            self._db.execute("DELETE FROM segments WHERE id = ?", (segment,))
        (self._folder / file).unlink(missing_ok=True)
        if self._segment is not None and self._segment.id == segment:
            self._leave_segment()

    def _own_segment(self) -> _Segment:
        """The segment that this process appends to. It is in the index before there is a file."""
        if (
            self._segment is not None
            and not self._db.execute("SELECT 1 FROM segments WHERE id = ?", (self._segment.id,)).fetchall()
        ):  # another process has deleted it
            self._leave_segment()
        if self._segment is None:
            name = os.urandom(8).hex() + SUFFIX
            with self._transaction():
                identity = self._db.execute(
                    "INSERT INTO segments (file, used) SELECT ?, coalesce(max(used), 0) + 1 FROM segments", (name,)
                ).lastrowid
            assert identity is not None, "a row that was inserted has a number"
            file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._segment, self._end = _Segment(identity, file), 0
        return self._segment

    def _leave_segment(self) -> None:
        """The next block goes to another one. Bytes that no row of the index has go with the segment."""
        if self._segment is not None:
            with suppress(OSError):
                os.ftruncate(self._segment.file, self._end)
            os.close(self._segment.file)
            self._segment = None

    def _file(self, segment: int) -> int:
        """A segment, open to be read. Raises FileNotFoundError."""
        if segment not in self._open_files:
            row = self._db.execute("SELECT file FROM segments WHERE id = ?", (segment,)).fetchone()
            if row is None:
                raise FileNotFoundError(segment)
            self._open_files[segment] = os.open(self._folder / row[0], os.O_RDONLY | os.O_CLOEXEC)
        return self._open_files[segment]


def _write(file: int, record: Sequence[memoryview | bytes], offset: int) -> None:
    for part in record:
        rest = memoryview(part)
        while rest:
            count = os.pwrite(file, rest, offset)
            rest, offset = rest[count:], offset + count

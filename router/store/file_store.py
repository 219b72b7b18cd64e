"""File store: files in pieces, which appear when they are whole."""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.router.store.object_store import HIDDEN, ObjectStore, StoredObject

if TYPE_CHECKING:
    import sqlalchemy

FILE: Final = "file"

PIECE_BYTES: Final = 2**18

UPLOAD_S: Final = 3600.0
"""Seconds after which an incomplete file is deleted."""

_PIECES_AT_A_TIME: Final = 16  # rows of one query


class FileStore:
    """Files of one router. Methods raise `StoreError` if the database fails."""

    def __init__(self, objects: ObjectStore) -> None:
        self.objects = objects
        self._database = objects.database
        self._pieces = objects.database.tables.pieces

    async def begin(self, tenant: str, file_id: str) -> None:
        """Creates a file that is not visible until it is complete."""

        def work(connection: "sqlalchemy.Connection") -> None:
            begun = hidden(file_id, expires_at=self._database.now(connection) + UPLOAD_S)
            self.objects.insert(connection, tenant, begun)

        await self._database.run(work)

    async def add(self, tenant: str, file_id: str, number: int, piece: bytes) -> None:
        """Piece number `number`."""
        await self._database.run(partial(self.put, tenant=tenant, file_id=file_id, number=number, piece=piece))
        await self.objects.purge_if_due()

    async def end(self, tenant: str, file: dict[str, Any], expires_at: float | None) -> None:
        """Completes a file. Raises `NotFoundError` if it took too long."""
        await self._database.run(partial(self.show, tenant=tenant, file=file, expires_at=expires_at))

    async def drop(self, tenant: str, file_id: str) -> None:
        """A file that is not whole."""
        await self.objects.delete(tenant, HIDDEN, file_id)

    async def content(self, tenant: str, file_id: str) -> AsyncIterator[bytes]:
        """Piece by piece, as far as the file is there."""
        pieces, after, is_over = self._pieces, -1, False
        while not is_over:
            some = pieces.select().where(pieces.c.tenant == tenant, pieces.c.id == file_id, pieces.c.number > after)
            asked = some.order_by(pieces.c.number).limit(_PIECES_AT_A_TIME)
            rows = await self._database.run(partial(_rows, asked=asked))
            for row in rows:
                yield row.data
            is_over = len(rows) < _PIECES_AT_A_TIME
            after = after if is_over else rows[-1].number

    # --- within a transaction ---

    def put(self, connection: "sqlalchemy.Connection", tenant: str, file_id: str, number: int, piece: bytes) -> None:
        """Stores piece `number` of a file, and adds its bytes to the tenant's total."""
        row = {"tenant": tenant, "id": file_id, "number": number, "data": piece}
        connection.execute(self._pieces.insert(), row)
        self.objects.grow(connection, tenant, file_id, len(piece))

    def show(
        self, connection: "sqlalchemy.Connection", tenant: str, file: dict[str, Any], expires_at: float | None
    ) -> None:
        """A hidden file is whole, and there until `expires_at`."""
        table = self._database.tables.objects
        self.objects.read(connection, tenant, HIDDEN, file["id"])
        found = table.update().where(table.c.tenant == tenant, table.c.id == file["id"])
        connection.execute(found.values(kind=FILE, expires_at=expires_at))
        self.objects.update(connection, tenant, file["id"], file)

    def num_pieces(self, connection: "sqlalchemy.Connection", tenant: str, file_id: str) -> int:
        """Pieces in which a file is stored."""
        from sqlalchemy import func, select

        pieces = self._pieces
        counted = select(func.count()).where(pieces.c.tenant == tenant, pieces.c.id == file_id)
        return int(connection.execute(counted).scalar_one())

    def num_bytes(self, connection: "sqlalchemy.Connection", tenant: str, file_id: str) -> int:
        """Bytes of all pieces."""
        from sqlalchemy import func, select

        pieces = self._pieces
        summed = select(func.sum(func.length(pieces.c.data)))
        return int(connection.execute(summed.where(pieces.c.tenant == tenant, pieces.c.id == file_id)).scalar() or 0)


def _rows(connection: "sqlalchemy.Connection", asked: "sqlalchemy.Select[Any]") -> "Sequence[sqlalchemy.Row[Any]]":
    return connection.execute(asked).all()


def hidden(file_id: str, parent_id: str | None = None, expires_at: float | None = None) -> StoredObject:
    """A file that is not whole. `parent_id`: the batch that writes it."""
    return StoredObject(kind=HIDDEN, id=file_id, parent_id=parent_id, input=[], object={}, expires_at=expires_at)

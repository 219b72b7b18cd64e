"""Conversation store: items in order; responses append their input and output.

Items are added at the end, some at a time, all of them or none. Two responses at the same time both read the items that
existed when they began; the first to end is stored first.
"""

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.router.store.object_store import ObjectStore, Page, StoredObject
from holdfast.worker.errors import InvalidRequestError, NotFoundError

if TYPE_CHECKING:
    import sqlalchemy

CONVERSATION: Final = "conversation"
ITEM: Final = "item"


class ConversationStore:
    """Conversations of one router. Methods raise `NotFoundError` for a conversation or an item that is not there, also
    of another tenant, and `StoreError` if the database fails.
    """

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._database = objects.database
        self._items = objects.database.tables.items

    async def create(self, tenant: str, conversation: dict[str, Any], items: Sequence[dict[str, Any]]) -> None:
        """Items have ids."""

        def work(connection: "sqlalchemy.Connection") -> None:
            made = StoredObject(kind=CONVERSATION, id=conversation["id"], input=[], object=conversation)
            self._objects.insert(connection, tenant, made)
            self._append(connection, tenant, conversation["id"], items)

        await self._database.run(work)
        await self._objects.purge_if_due()

    async def append(self, tenant: str, conversation_id: str, items: Sequence[dict[str, Any]], max_bytes: int) -> None:
        """Raises `InvalidRequestError` where the conversation has more than `max_bytes` then, or an id is there."""

        def work(connection: "sqlalchemy.Connection") -> None:
            found = self._objects.read(connection, tenant, CONVERSATION, conversation_id)
            if (size := found.num_bytes + len(json.dumps(items))) > max_bytes:
                limit = f"must leave the conversation at most {max_bytes} bytes (limits.max_message_bytes), not {size}"
                raise InvalidRequestError("items", len(items), limit)
            self._append(connection, tenant, conversation_id, items)

        await self._database.run(work)
        await self._objects.purge_if_due()

    async def all_items(self, tenant: str, conversation_id: str, max_bytes: int) -> list[dict[str, Any]]:
        """Oldest first. Raises `InvalidRequestError` if they are too large."""

        def work(connection: "sqlalchemy.Connection") -> list[dict[str, Any]]:
            found = self._objects.read(connection, tenant, CONVERSATION, conversation_id)
            if found.num_bytes > max_bytes:
                limit = f"must have at most {max_bytes} bytes (limits.max_message_bytes), has {found.num_bytes}"
                raise InvalidRequestError("conversation", conversation_id, limit)
            mine = self._mine(tenant, conversation_id)
            rows = connection.execute(self._items.select().where(*mine).order_by(self._items.c.number)).all()
            return [json.loads(row.data) for row in rows]

        return await self._database.run(work)

    async def item(self, tenant: str, conversation_id: str, item_id: str) -> dict[str, Any]:
        """One item. Raises `NotFoundError` if the conversation or the item is not there."""

        def work(connection: "sqlalchemy.Connection") -> dict[str, Any]:
            self._objects.read(connection, tenant, CONVERSATION, conversation_id)
            item: dict[str, Any] = json.loads(self._row(connection, tenant, conversation_id, item_id).data)
            return item

        return await self._database.run(work)

    async def page(self, tenant: str, conversation_id: str, page: Page) -> tuple[list[dict[str, Any]], bool]:
        """Items, and whether there are more. Raises `InvalidRequestError` for an `after` that is not there."""
        return await self._database.run(partial(self._page, tenant=tenant, conversation_id=conversation_id, page=page))

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> dict[str, Any]:
        """Deletes an item for good. Returns the conversation."""

        def work(connection: "sqlalchemy.Connection") -> dict[str, Any]:
            conversation = self._objects.read(connection, tenant, CONVERSATION, conversation_id).object
            row = self._row(connection, tenant, conversation_id, item_id)
            mine = self._mine(tenant, conversation_id)
            connection.execute(self._items.delete().where(*mine, self._items.c.number == row.number))
            self._objects.grow(connection, tenant, conversation_id, -len(row.data))
            return conversation

        conversation = await self._database.run(work)
        await self._database.empty_log()
        return conversation

    # --- within a transaction ---

    def append_if_there(
        self, connection: "sqlalchemy.Connection", tenant: str, conversation_id: str, items: Sequence[dict[str, Any]]
    ) -> None:
        """Appends items that are not there yet: a response that was asked for again, with the same id, has been
        added.
        """
        try:
            self._objects.read(connection, tenant, CONVERSATION, conversation_id)
        except NotFoundError:
            return
        self._objects.lock(connection, tenant, conversation_id)
        known = self._known(connection, tenant, conversation_id, [item["id"] for item in items])
        self._append(connection, tenant, conversation_id, [item for item in items if item["id"] not in known])

    def _append(
        self, connection: "sqlalchemy.Connection", tenant: str, conversation_id: str, items: Sequence[dict[str, Any]]
    ) -> None:
        from sqlalchemy import func, select

        if not items:
            return
        self._objects.touch(connection, tenant, conversation_id)  # and locks it
        ids = [item["id"] for item in items]
        again = self._known(connection, tenant, conversation_id, ids) or {one for one in ids if ids.count(one) > 1}
        if again:
            raise InvalidRequestError("items", min(again), "must have ids that no item of the conversation has")
        last = connection.execute(
            select(func.max(self._items.c.number)).where(*self._mine(tenant, conversation_id))
        ).scalar_one()
        of_all = {"tenant": tenant, "conversation_id": conversation_id}
        first = 0 if last is None else last + 1
        rows = [
            {**of_all, "number": number, "id": item["id"], "data": json.dumps(item)}
            for number, item in enumerate(items, first)
        ]
        connection.execute(self._items.insert(), rows)
        self._objects.grow(connection, tenant, conversation_id, sum(len(row["data"]) for row in rows))

    def _known(
        self, connection: "sqlalchemy.Connection", tenant: str, conversation_id: str, ids: Sequence[str]
    ) -> set[str]:
        """Ids among these that are there."""
        items = self._items
        return {
            row.id
            for start in range(0, len(ids), 500)
            for row in connection.execute(
                items.select().where(*self._mine(tenant, conversation_id), items.c.id.in_(ids[start : start + 500]))
            )
        }

    def _row(
        self, connection: "sqlalchemy.Connection", tenant: str, conversation_id: str, item_id: str
    ) -> "sqlalchemy.Row[Any]":
        mine = self._mine(tenant, conversation_id)
        row = connection.execute(self._items.select().where(*mine, self._items.c.id == item_id)).first()
        if row is None:
            raise NotFoundError(ITEM, item_id)
        return row

    def _page(
        self, connection: "sqlalchemy.Connection", tenant: str, conversation_id: str, page: Page
    ) -> tuple[list[dict[str, Any]], bool]:
        self._objects.read(connection, tenant, CONVERSATION, conversation_id)
        number, asked = self._items.c.number, self._items.select().where(*self._mine(tenant, conversation_id))
        if page.after is not None:
            try:
                after = self._row(connection, tenant, conversation_id, page.after).number
            except NotFoundError:
                raise InvalidRequestError("after", page.after, "must be the id of one of the items") from None
            asked = asked.where(number > after if page.is_ascending else number < after)
        asked = asked.order_by(number if page.is_ascending else number.desc()).limit(page.limit + 1)
        found = [json.loads(row.data) for row in connection.execute(asked).all()]
        return found[: page.limit], len(found) > page.limit

    def _mine(self, tenant: str, conversation_id: str) -> "tuple[sqlalchemy.ColumnElement[bool], ...]":
        return self._items.c.tenant == tenant, self._items.c.conversation_id == conversation_id

"""Response store: responses and the input that they answer, as turns of conversations.

    store = ResponseStore(ObjectStore(await Database.open("/var/lib/holdfast"), StoreLimits()))
    await store.save(tenant, response)
    turns = await store.turns(tenant, response.id, max_bytes)  # the turns that end with it

SQLite below a folder serves the routers of one host; PostgreSQL those of several.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from holdfast.router.store.conversation_store import ConversationStore
from holdfast.router.store.object_store import ObjectStore, StoredObject
from holdfast.worker.errors import InvalidRequestError

if TYPE_CHECKING:
    import sqlalchemy

RESPONSE: Final = "response"

MAX_TURNS: Final = 4096
"""Most turns that continue each other."""

OPEN: Final = ("queued", "in_progress")
"""States of a response that is not over."""

_ANSWERED: Final = ("completed", "incomplete")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One turn of a conversation."""

    id: str
    previous_id: str | None
    """The response that it continues."""
    input: list[dict[str, Any]]
    """Items of this turn alone."""
    response: dict[str, Any]
    """The response object."""

    def items(self) -> list[dict[str, Any]]:
        """Input and output of the turn, as the input of the next one has them."""
        return [*self.input, *self.response["output"]]

    @property
    def conversation_id(self) -> str | None:
        """Conversation that its items are added to when it is over."""
        conversation: dict[str, str] | None = self.response.get("conversation")
        return None if conversation is None else conversation["id"]


class ResponseStore:
    """Responses of one router. Methods raise `StoreError` if the database fails."""

    def __init__(self, objects: ObjectStore) -> None:
        self.objects = objects
        self.database = objects.database
        self.conversations = ConversationStore(objects)

    async def save(self, tenant: str, stored: StoredResponse, *, is_kept: bool = True) -> None:
        """Durably, and its items at the end of its conversation; with `is_kept` false these alone."""

        def work(connection: "sqlalchemy.Connection") -> None:
            if is_kept:
                self.insert(connection, tenant, stored)
            self.extend_conversation(connection, tenant, stored)

        await self.database.run(work)
        await self.objects.purge_if_due()

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises `NotFoundError`, also for one of another tenant."""
        return await self.database.run(lambda connection: self.read(connection, tenant, response_id))

    async def turns(self, tenant: str, response_id: str, max_bytes: int) -> list[StoredResponse]:
        """The turns that end with a response, oldest first. Raises `InvalidRequestError` where one is missing, or they
        are too many or too large.
        """
        turns = await self.database.run(lambda connection: self._chain(connection, tenant, response_id, max_bytes))
        field, last = "previous_response_id", turns[0].previous_id if turns else response_id
        if last is not None and len(turns) < MAX_TURNS:
            raise InvalidRequestError(field, response_id, f"must be stored: {last!r} is not, or was deleted")
        if last is not None:
            raise InvalidRequestError(field, response_id, f"must continue at most {MAX_TURNS} responses")
        return turns

    async def delete(self, tenant: str, response_id: str) -> None:
        """Deletes for good: the text is overwritten. Raises `NotFoundError`."""
        await self.objects.delete(tenant, RESPONSE, response_id)

    # --- within a transaction ---

    def insert(self, connection: "sqlalchemy.Connection", tenant: str, stored: StoredResponse) -> None:
        """Inserts a response, replacing one with its id."""
        made = StoredObject(
            kind=RESPONSE, id=stored.id, parent_id=stored.previous_id, input=stored.input, object=stored.response
        )
        self.objects.insert(connection, tenant, made)

    def read(self, connection: "sqlalchemy.Connection", tenant: str, response_id: str) -> StoredResponse:
        """Raises `NotFoundError`."""
        found = self.objects.read(connection, tenant, RESPONSE, response_id)
        return StoredResponse(id=found.id, previous_id=found.parent_id, input=found.input, response=found.object)

    def extend_conversation(self, connection: "sqlalchemy.Connection", tenant: str, stored: StoredResponse) -> None:
        """Adds the turn's items to the conversation, unless that was deleted, or there is no answer."""
        if stored.conversation_id is not None and stored.response["status"] in _ANSWERED:
            self.conversations.append_if_there(connection, tenant, stored.conversation_id, stored.items())

    def _chain(
        self, connection: "sqlalchemy.Connection", tenant: str, response_id: str, max_bytes: int
    ) -> list[StoredResponse]:
        """The response and those before it, oldest first, as far as they are there."""
        from sqlalchemy import literal, select

        table = self.database.tables.objects
        columns = table.c.id, table.c.parent_id, table.c.num_bytes
        mine = table.c.tenant == tenant, table.c.kind == RESPONSE
        chain = select(*columns, literal(0).label("depth")).where(*mine, table.c.id == response_id)
        ending = chain.cte("chain", recursive=True)
        before = select(*columns, (ending.c.depth + 1).label("depth"))
        ending = ending.union_all(before.where(*mine, table.c.id == ending.c.parent_id, ending.c.depth < MAX_TURNS - 1))
        found = connection.execute(select(ending).order_by(ending.c.depth.desc())).all()
        if (size := sum(row.num_bytes for row in found)) > max_bytes:
            message = f"must be a conversation of at most {max_bytes} bytes (limits.max_message_bytes), has {size}"
            raise InvalidRequestError("previous_response_id", response_id, message)
        return [self.read(connection, tenant, row.id) for row in found]

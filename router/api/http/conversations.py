"""Endpoints of `/v1/conversations`: stored conversations and their items, as OpenAI has them."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from starlette.requests import Request
from starlette.types import ASGIApp

from holdfast.router.api.http.answering import Endpoint, json_response
from holdfast.router.api.http.json_body import Listed, Reads
from holdfast.router.api.http.request_reader import RequestReader
from holdfast.router.api.http.response_history import ResponseHistory, as_items
from holdfast.router.api.http.responses_body import ResponsesBody, chat_body
from holdfast.router.api.http.stored_objects import check_metadata, id_of, listing, page_asked
from holdfast.router.store.conversation_store import CONVERSATION, ITEM, ConversationStore
from holdfast.router.store.object_store import is_id
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.value_types import Neutral

PATH: Final = "/v1/conversations"
_ONE: Final = f"{PATH}/{{conversation_id}}"
_ITEMS: Final = f"{_ONE}/items"
_ITEM: Final = f"{_ITEMS}/{{item_id}}"

MAX_ITEMS: Final = 20
"""Most items added at a time."""


class StoredBody(Reads):
    """A body of an endpoint without output."""

    neutral: ClassVar[Neutral] = {}


class ConversationBody(StoredBody):
    """`POST /v1/conversations`."""

    lists_of_objects = ("items",)
    items: Listed[dict[str, Any]] | None = None
    metadata: dict[str, Any] | None = None

    def _check_together(self) -> None:
        check_metadata(self.metadata)
        _check_items(self.items or ())


class MetadataBody(StoredBody):
    """Change of a stored object: its metadata alone."""

    metadata: dict[str, Any] | None

    def _check_together(self) -> None:
        check_metadata(self.metadata)


class ItemsBody(StoredBody):
    """`POST /v1/conversations/{id}/items`."""

    lists_of_objects = ("items",)
    items: Listed[dict[str, Any]]

    def _check_together(self) -> None:
        _check_items(self.items)


class ConversationEndpoints:
    """Conversation endpoints of one router. Errors are raised as `HoldfastError`."""

    bodies: ClassVar[dict[str, tuple[type[Reads], str]]] = {
        PATH: (ConversationBody, "A new conversation."),
        _ONE: (MetadataBody, "Changes a conversation's metadata."),
        _ITEMS: (ItemsBody, "Adds items at the end of a conversation."),
    }
    """Body of each path's POST, and its purpose."""

    def __init__(self, reader: RequestReader, history: ResponseHistory, max_bytes: int) -> None:
        """A conversation has at most `max_bytes`."""
        self._reader = reader
        self._history = history
        self._max_bytes = max_bytes

    def routes(self) -> list[tuple[str, str, Endpoint]]:
        """Method, path and endpoint of each."""
        return [
            ("POST", PATH, self.create),
            ("GET", _ONE, self.get),
            ("POST", _ONE, self.update),
            ("DELETE", _ONE, self.delete),
            ("POST", _ITEMS, self.add),
            ("GET", _ITEMS, self.items),
            ("GET", _ITEM, self.item),
            ("DELETE", _ITEM, self.delete_item),
        ]

    async def create(self, request: Request) -> ASGIApp:
        """Answers `POST /v1/conversations`."""
        content = await self._reader.content(request) if _has_body(request) else b"{}"
        name = uuid.uuid4().hex
        body, items = await self._reader.decoded(content, ConversationBody, lambda one: as_items(one.items or (), name))
        conversation = {
            "id": f"conv_{name}",
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": body.metadata or {},
        }
        store = self._history.to_write("conversation").conversations
        await store.create(self._history.tenant(request), conversation, items)
        return json_response(conversation)

    async def get(self, request: Request) -> ASGIApp:
        """Answers `GET /v1/conversations/{conversation_id}`."""
        conversation_id = _id_of(request)
        objects = self._history.required(conversation_id, CONVERSATION).objects
        return json_response((await objects.get(self._history.tenant(request), CONVERSATION, conversation_id)).object)

    async def update(self, request: Request) -> ASGIApp:
        """Answers `POST /v1/conversations/{conversation_id}`."""
        conversation_id = _id_of(request)
        body, _ = await self._reader.decoded(await self._reader.content(request), MetadataBody, lambda one: None)
        objects = self._history.required(conversation_id, CONVERSATION).objects
        changed = {"metadata": body.metadata or {}}
        tenant = self._history.tenant(request)
        return json_response(await objects.change(tenant, CONVERSATION, conversation_id, lambda old: old | changed))

    async def delete(self, request: Request) -> ASGIApp:
        """Answers `DELETE /v1/conversations/{conversation_id}`."""
        conversation_id = _id_of(request)
        objects = self._history.required(conversation_id, CONVERSATION).objects
        await objects.delete(self._history.tenant(request), CONVERSATION, conversation_id)
        return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def add(self, request: Request) -> ASGIApp:
        """Answers `POST /v1/conversations/{conversation_id}/items`."""
        conversation_id, name = _id_of(request), uuid.uuid4().hex
        _check_included(request)
        content = await self._reader.content(request)
        _, items = await self._reader.decoded(content, ItemsBody, lambda one: as_items(one.items, name))
        store = self._items(conversation_id)
        await store.append(self._history.tenant(request), conversation_id, items, self._max_bytes)
        return json_response(listing(items, has_more=False))

    async def items(self, request: Request) -> ASGIApp:
        """Newest first, unless `order` is `asc`."""
        conversation_id, page = _id_of(request), page_asked(request.query_params)
        _check_included(request)
        store, tenant = self._items(conversation_id), self._history.tenant(request)
        found, has_more = await store.page(tenant, conversation_id, page)
        return json_response(listing(found, has_more=has_more))

    async def item(self, request: Request) -> ASGIApp:
        """Answers `GET /v1/conversations/{conversation_id}/items/{item_id}`."""
        conversation_id, item_id = _id_of(request), id_of(request, "item_id", ITEM)
        _check_included(request)
        store, tenant = self._items(conversation_id), self._history.tenant(request)
        return json_response(await store.item(tenant, conversation_id, item_id))

    async def delete_item(self, request: Request) -> ASGIApp:
        """Answers `DELETE /v1/conversations/{conversation_id}/items/{item_id}`."""
        conversation_id, item_id = _id_of(request), id_of(request, "item_id", ITEM)
        store, tenant = self._items(conversation_id), self._history.tenant(request)
        return json_response(await store.delete_item(tenant, conversation_id, item_id))

    def _items(self, conversation_id: str) -> ConversationStore:
        return self._history.required(conversation_id, CONVERSATION).conversations


def _id_of(request: Request) -> str:
    return id_of(request, "conversation_id", CONVERSATION)


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def _check_included(request: Request) -> None:
    """Items are returned with all their stored fields; the values of `include` are only checked for their form."""
    for name in ("include", "include[]"):
        for value in request.query_params.getlist(name):
            if not value.replace(".", "").replace("_", "").isalnum():
                raise InvalidRequestError("include", value, "must be the name of a field")


def _check_items(items: Sequence[Mapping[str, Any]]) -> None:
    """Items that a chat can be made of. Raises `InvalidRequestError`."""
    if len(items) > MAX_ITEMS:
        raise InvalidRequestError("items", len(items), f"must be at most {MAX_ITEMS} at a time")
    for index, item in enumerate(items):
        item_id = item.get("id")
        if item_id is not None and not (isinstance(item_id, str) and is_id(item_id)):
            raise InvalidRequestError(f"items[{index}].id", item_id, "must be 1 to 512 printable ASCII characters")
    try:
        chat_body(ResponsesBody.made({"input": list(items)}))
    except InvalidRequestError as error:
        raise InvalidRequestError(error.field.replace("input", "items", 1), error.value, error.limit) from None

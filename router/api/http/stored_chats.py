"""Chat completions that are stored, and their endpoints: list, read, change and delete, as OpenAI has them."""

import re
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Final

from starlette.requests import Request
from starlette.types import ASGIApp

from holdfast.router.api.http.answering import Endpoint, json_response
from holdfast.router.api.http.bodies import ChatBody
from holdfast.router.api.http.chat_completions import ChatChunks, ChatView, whole_chat
from holdfast.router.api.http.conversations import MetadataBody
from holdfast.router.api.http.json_body import Reads
from holdfast.router.api.http.request_reader import RequestReader
from holdfast.router.api.http.response_history import ResponseHistory
from holdfast.router.api.http.stored_objects import id_of, listing, page_asked, page_of
from holdfast.router.dispatch.request_stream import merged
from holdfast.router.generation import Generation, OutputDelta, Usage
from holdfast.router.requests.answer import SampledAnswer
from holdfast.router.store.object_store import ObjectStore, StoredObject
from holdfast.worker.errors import StoreError

CHAT: Final = "chat completion"
PATH: Final = "/v1/chat/completions"
_ONE: Final = f"{PATH}/{{completion_id}}"

_METADATA: Final = re.compile(r"metadata\[(.+)\]", re.DOTALL)
_SHOWN: Final = ("tools", "tool_choice")
_PARAMETERS: Final = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")

Save = Callable[[dict[str, Any]], Awaitable[None]]


class StoredChats:
    """Stored chats of one router. Errors are raised as `HoldfastError`."""

    bodies: ClassVar[dict[str, tuple[type[Reads], str]]] = {
        _ONE: (MetadataBody, "Changes a stored chat completion's metadata.")
    }

    def __init__(self, reader: RequestReader, history: ResponseHistory) -> None:
        self._reader = reader
        self._history = history

    def routes(self) -> list[tuple[str, str, Endpoint]]:
        """Method, path and endpoint of each."""
        return [
            ("GET", PATH, self.listed),
            ("GET", _ONE, self.get),
            ("POST", _ONE, self.update),
            ("DELETE", _ONE, self.delete),
            ("GET", f"{_ONE}/messages", self.messages),
        ]

    def save(self, request: Request, body: ChatBody) -> Save | None:
        """Stores the answer to a body; None where it is not to be stored."""
        if not body.store or (store := self._history.store) is None:
            return None
        tenant, objects = self._history.tenant(request), store.objects

        async def save(response: dict[str, Any]) -> None:
            try:
                await objects.save(tenant, _stored(body, response))
            except StoreError as error:
                self._history.note_failure(error)

        return save

    async def listed(self, request: Request) -> ASGIApp:
        """Oldest first, unless `order` is `desc`."""
        query = request.query_params
        page, model, wanted = page_asked(query, order="asc"), query.get("model"), {}
        for name, value in query.items():
            if (found := _METADATA.fullmatch(name)) is not None:
                wanted[found[1]] = value

        def is_selected(chat: dict[str, Any]) -> bool:
            return model in (None, chat["model"]) and wanted.items() <= chat["metadata"].items()

        if self._history.store is None:
            return json_response(listing([], has_more=False))
        objects = self._history.store.objects
        chats, has_more = await objects.listed(self._history.tenant(request), CHAT, page, is_selected)
        return json_response(listing(chats, has_more=has_more))

    async def get(self, request: Request) -> ASGIApp:
        """Answers `GET /v1/chat/completions/{completion_id}`."""
        return json_response((await self._stored(request)).object)

    async def messages(self, request: Request) -> ASGIApp:
        """Messages that the completion answers."""
        page = page_asked(request.query_params, order="asc")
        return json_response(page_of((await self._stored(request)).input, page))

    async def update(self, request: Request) -> ASGIApp:
        """Answers `POST /v1/chat/completions/{completion_id}`."""
        completion_id = _id_of(request)
        body, _ = await self._reader.decoded(await self._reader.content(request), MetadataBody, lambda one: None)
        changed, tenant = {"metadata": body.metadata or {}}, self._history.tenant(request)
        objects = self._objects(completion_id)
        return json_response(await objects.change(tenant, CHAT, completion_id, lambda old: old | changed))

    async def delete(self, request: Request) -> ASGIApp:
        """Answers `DELETE /v1/chat/completions/{completion_id}`."""
        completion_id = _id_of(request)
        await self._objects(completion_id).delete(self._history.tenant(request), CHAT, completion_id)
        return json_response({"id": completion_id, "object": "chat.completion.deleted", "deleted": True})

    async def _stored(self, request: Request) -> StoredObject:
        completion_id = _id_of(request)
        return await self._objects(completion_id).get(self._history.tenant(request), CHAT, completion_id)

    def _objects(self, completion_id: str) -> ObjectStore:
        return self._history.required(completion_id, CHAT).objects


class StoredChunks:
    """Writes the chunks of a stream, as `ChatChunks`, and stores the chat before the last of them."""

    def __init__(self, view: ChatView, answer: SampledAnswer, save: Save) -> None:
        self._chunks = ChatChunks(view, answer)
        self._view = view
        self._answer = answer
        self._save = save
        self._deltas: dict[int, list[OutputDelta]] = {}
        self._usage: Usage | None = None

    @property
    def num_events(self) -> int:
        return self._chunks.num_events

    @num_events.setter
    def num_events(self, number: int) -> None:
        self._chunks.num_events = number

    def of(self, delta: OutputDelta) -> bytes:
        self._note(delta)
        return self._chunks.of(delta)

    def plain(self, delta: OutputDelta) -> bytes | None:
        events = self._chunks.plain(delta)
        if events is not None:
            self._note(delta)
        return events

    def holds(self, choice: int) -> bool:
        return self._chunks.holds(choice)

    async def end(self) -> bytes:
        if (usage := self._usage) is not None:
            request = self._answer.request
            outputs = tuple(merged(deltas) for _, deltas in sorted(self._deltas.items()))
            whole = Generation(
                request_id=request.request_id, model=self._answer.model, completions=outputs, usage=usage
            )
            await self._save(whole_chat(self._view, whole, request.prompt_token_ids))
        return await self._chunks.end()

    def _note(self, delta: OutputDelta) -> None:
        self._deltas.setdefault(delta.sequence_index, []).append(delta)
        self._usage = delta.usage or self._usage


def _stored(body: ChatBody, response: dict[str, Any]) -> StoredObject:
    shown = {
        **response,
        "request_id": response["id"].removeprefix("chatcmpl-"),
        "metadata": body.metadata or {},
        "input_user": (body.model_extra or {}).get("user"),
        "response_format": None if body.response_format is None else body.response_format.model_dump(),
        **{name: getattr(body, name) for name in _SHOWN},
        **{name: body.given(name) for name in _PARAMETERS},
    }
    messages = [_message(one, f"{response['id']}-{index}") for index, one in enumerate(body.messages)]
    return StoredObject(kind=CHAT, id=response["id"], input=messages, object=shown)


def _message(message: dict[str, Any], message_id: str) -> dict[str, Any]:
    """Content that came in parts is returned in parts."""
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    return {"name": None, **message, "id": message_id, "content": None if parts else content, "content_parts": parts}


def _id_of(request: Request) -> str:
    return id_of(request, "completion_id", CHAT)

"""Response history of a router's HTTP API: turns of conversations that are stored."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Final

from starlette.requests import Request

from holdfast.router.api.http.background import BackgroundResponses
from holdfast.router.api.http.request_reader import tenant_of
from holdfast.router.api.http.responses_body import ResponsesBody
from holdfast.router.api.http.stored_objects import SETTING
from holdfast.router.api.http.submission import Submission
from holdfast.router.events import StoreFigures
from holdfast.router.security.gate import Gate
from holdfast.router.store.conversation_store import CONVERSATION
from holdfast.router.store.object_store import is_id
from holdfast.router.store.response_store import OPEN, RESPONSE, ResponseStore, StoredResponse
from holdfast.worker.errors import InvalidRequestError, NotFoundError, PermissionDeniedError, StoreError

_ROLES: Final = {"assistant": "output_text"}


class ResponseHistory:
    """Stored responses of one router. Store and background responses are set by the code that opens them."""

    def __init__(self, gate: Gate) -> None:
        self.store: ResponseStore | None = None
        """None: nothing is stored."""
        self.background: BackgroundResponses | None = None
        """Comes with a store."""
        self.num_failures = 0
        """Answers that could not be stored."""
        self._last_failure = ""
        self._gate = gate

    def required(self, object_id: str, kind: str = RESPONSE) -> ResponseStore:
        """The store. Raises `NotFoundError` where there is none."""
        if self.store is None:
            raise NotFoundError(kind, object_id)
        return self.store

    def to_write(self, field: str) -> ResponseStore:
        """The store. Raises `InvalidRequestError` where there is none."""
        if self.store is None:
            raise InvalidRequestError(field, "this request", SETTING)
        return self.store

    def tenant(self, request: Request) -> str:
        """Tenant whose responses the caller may see. Raises `PermissionDeniedError`."""
        caller, named = self._gate.caller(), tenant_of(request)
        if caller.tenant is None:
            return named
        if named not in ("", caller.tenant):
            raise PermissionDeniedError("tenant", f"the key {caller.name!r} may not name another tenant")
        return caller.tenant

    def note_failure(self, error: StoreError) -> None:
        """Counts a failure of the store, and keeps its text for /health."""
        self.num_failures += 1
        self._last_failure = str(error)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for health, once a response could not be stored."""
        if not self.num_failures:
            return ()
        return (f"{self.num_failures} answers could not be stored: {self._last_failure}",)

    async def figures(self) -> StoreFigures | None:
        """Size of the store; None if there is none, or if the database fails."""
        try:
            return None if self.store is None else await self.store.objects.figures()
        except StoreError:
            return None

    async def close(self) -> None:
        if self.store is not None:
            await self.store.database.close()


class Turn:
    """One request of `/v1/responses` and its place in a conversation of `tenant`."""

    def __init__(self, history: ResponseHistory, tenant: str, body: ResponsesBody) -> None:
        self._is_kept = history.store is not None and body.store is not False
        self.is_saved = history.store is not None and (self._is_kept or body.conversation_id is not None)
        """Whether something is stored when it is over."""
        self._history = history
        self._tenant = tenant
        self._body = body

    async def earlier(self, max_bytes: int, submission: Submission) -> list[dict[str, Any]]:
        """Items before this turn, also where an earlier attempt has added it.

        Raises `InvalidRequestError`, naming the field, and `NotFoundError` for a conversation that is not there.
        """
        if (conversation_id := self._body.conversation_id) is not None:
            if not is_id(conversation_id):
                raise NotFoundError(CONVERSATION, conversation_id)
            conversations = self._history.to_write("conversation").conversations
            items = await conversations.all_items(self._tenant, conversation_id, max_bytes)
            own = f"_{submission.identity.request_id}"
            return list(takewhile(lambda item: own not in item["id"], items)) if submission.record else items
        previous, store = self._body.previous_response_id, self._history.store
        if previous is None:
            return []
        if store is None:
            raise InvalidRequestError("previous_response_id", previous, SETTING)
        if not is_id(previous) or previous == f"resp_{self._body.given('request_id')}":
            raise InvalidRequestError("previous_response_id", previous, "must be the id of an earlier response")
        turns = await store.turns(self._tenant, previous, max_bytes)
        if (status := turns[-1].response["status"]) in OPEN:
            raise InvalidRequestError("previous_response_id", previous, f"must be over, and is {status}")
        return [item for turn in turns for item in turn.items()]

    @property
    def is_kept(self) -> bool:
        """The response can be read later."""
        return self._is_kept

    def stored(self, response: dict[str, Any]) -> StoredResponse:
        """The turn as it is stored."""
        return StoredResponse(
            id=response["id"],
            previous_id=self._body.previous_response_id,
            input=as_items(self._body.input, response["id"].removeprefix("resp_")),
            response=response,
        )

    async def save(self, response: dict[str, Any]) -> None:
        """Stores the response, where that is wanted; `store` of it says whether it is. A conversation gets its items in
        any case.
        """
        if not self.is_saved or (store := self._history.store) is None:
            return
        try:
            await store.save(self._tenant, self.stored(response), is_kept=self._is_kept)
        except StoreError as error:
            self._history.note_failure(error)
            response["store"] = False


def as_items(given: str | Sequence[dict[str, Any]], request_id: str) -> list[dict[str, Any]]:
    """The input of a request as items with ids, as they are listed."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_as_item(item, f"msg_{request_id}_in_{index}") for index, item in enumerate(items)]


def _as_item(item: dict[str, Any], own_id: str) -> dict[str, Any]:
    kind, content = item.get("type", "message"), item.get("content")
    named = {**item, "id": item.get("id") or own_id, "type": kind}
    if kind != "message" or not isinstance(content, str):
        return named
    part = _ROLES.get(str(item.get("role")), "input_text")
    return {"status": "completed", **named, "content": [{"type": part, "text": content}]}

"""Response history of a router's HTTP API: turns of conversations that are stored, and pages of their items."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request

from holdfast.router.api.http.background import BackgroundResponses
from holdfast.router.api.http.request_reader import tenant_of
from holdfast.router.api.http.responses_body import ResponsesBody
from holdfast.router.security.gate import Gate
from holdfast.router.store.response_store import MAX_ID_LENGTH, ResponseStore, StoredResponse
from holdfast.worker.errors import InvalidRequestError, NotFoundError, PermissionDeniedError, StoreError

SETTING: Final = "this server stores no responses; start it with --store FOLDER"

_MOST_LISTED: Final = 100
_ROLES: Final = {"assistant": "output_text"}


class ResponseHistory:
    """Of one router. Store and background responses are set by the code that opens them."""

    def __init__(self, gate: Gate) -> None:
        self.store: ResponseStore | None = None
        """None: nothing is stored."""
        self.background: BackgroundResponses | None = None
        """Comes with a store."""
        self.num_failures = 0
        """Responses that could not be stored."""
        self._last_failure = ""
        self._gate = gate

    def required(self, response_id: str) -> ResponseStore:
        """The store. Raises `NotFoundError` where there is none."""
        if self.store is None:
            raise NotFoundError("response", response_id)
        return self.store

    def tenant(self, request: Request) -> str:
        """Whose responses the caller may see. Raises `PermissionDeniedError`."""
        caller, named = self._gate.caller(), tenant_of(request)
        if caller.tenant is None:
            return named
        if named not in ("", caller.tenant):
            raise PermissionDeniedError("tenant", f"the key {caller.name!r} may not name another tenant")
        return caller.tenant

    def note_failure(self, error: StoreError) -> None:
        self.num_failures += 1
        self._last_failure = str(error)

    @property
    def warnings(self) -> tuple[str, ...]:
        """For health, once a response could not be stored."""
        if not self.num_failures:
            return ()
        return (f"{self.num_failures} responses could not be stored: {self._last_failure}",)

    async def close(self) -> None:
        if self.store is not None:
            await self.store.database.close()


class Turn:
    """One request of `/v1/responses` and its place in a conversation of `tenant`."""

    def __init__(self, history: ResponseHistory, tenant: str, body: ResponsesBody) -> None:
        self.is_stored = history.store is not None and body.store is not False
        self._history = history
        self._tenant = tenant
        self._body = body

    async def earlier(self, max_bytes: int) -> list[dict[str, Any]]:
        """Items of the turns before this one. Raises `InvalidRequestError`, naming `previous_response_id`."""
        previous, store = self._body.previous_response_id, self._history.store
        if previous is None:
            return []
        if store is None:
            raise InvalidRequestError("previous_response_id", previous, SETTING)
        if not 0 < len(previous) <= MAX_ID_LENGTH or previous == f"resp_{self._body.given('request_id')}":
            raise InvalidRequestError("previous_response_id", previous, "must be the id of an earlier response")
        turns = await store.turns(self._tenant, previous, max_bytes)
        if (status := turns[-1].response["status"]) in ("queued", "in_progress"):
            raise InvalidRequestError("previous_response_id", previous, f"must be over, and is {status}")
        return [item for turn in turns for item in turn.items()]

    def stored(self, response: dict[str, Any]) -> StoredResponse:
        """The turn as it is stored."""
        return StoredResponse(
            id=response["id"],
            created_at=response["created_at"],
            previous_id=self._body.previous_response_id,
            input=_as_items(self._body.input, response["id"].removeprefix("resp_")),
            response=response,
        )

    async def save(self, response: dict[str, Any]) -> None:
        """Stores the response, where that is wanted; `store` of it says whether it is."""
        if not self.is_stored or (store := self._history.store) is None:
            return
        try:
            await store.save(self._tenant, self.stored(response))
        except StoreError as error:
            self._history.note_failure(error)
            response["store"] = False


def _as_items(given: str | Sequence[dict[str, Any]], request_id: str) -> list[dict[str, Any]]:
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


def page_of(items: Sequence[dict[str, Any]], asked: Mapping[str, str]) -> dict[str, Any]:
    """A list as OpenAI's clients page through it, by `order`, `after` and `limit`. Raises `InvalidRequestError`."""
    order, limit, after = asked.get("order", "desc"), asked.get("limit", "20"), asked.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order", order, "must be asc or desc")
    if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MOST_LISTED:
        raise InvalidRequestError("limit", limit, f"must be in [1, {_MOST_LISTED}]")
    rest = list(items) if order == "asc" else list(items)[::-1]
    if after is not None:
        ids = [item["id"] for item in rest]
        if after not in ids:
            raise InvalidRequestError("after", after, "must be the id of one of the items")
        rest = rest[ids.index(after) + 1 :]
    page = rest[: int(limit)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, **ends, "has_more": len(rest) > len(page)}

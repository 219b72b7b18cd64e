"""Responses that are stored: turns that continue one, and the endpoints that read and delete them."""

from collections.abc import Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.types import ASGIApp

from holdfast.router.api.http.answering import Endpoint, json_response
from holdfast.router.api.http.request_reader import tenant_of
from holdfast.router.api.http.responses_body import ResponsesBody
from holdfast.router.security.gate import Gate
from holdfast.router.store.response_store import MAX_ID_LENGTH, ResponseStore, StoredResponse
from holdfast.worker.errors import InvalidRequestError, NotFoundError, PermissionDeniedError, StoreError

PATH: Final = "/v1/responses/{response_id}"
SETTING: Final = "this server stores no responses; start it with --store FOLDER"

_MOST_LISTED: Final = 100
_ROLES: Final = {"assistant": "output_text"}


class Turn:
    """One request of `/v1/responses` and its place in a conversation."""

    def __init__(self, history: "ResponseHistory", request: Request, body: ResponsesBody) -> None:
        self.is_stored = history.store is not None and body.store is not False
        self._history = history
        self._request = request
        self._body = body

    async def earlier(self, max_bytes: int) -> list[dict[str, Any]]:
        """Items of the turns before this one. Raises `InvalidRequestError`, naming `previous_response_id`."""
        previous = self._body.previous_response_id
        if previous is None:
            return []
        store = self._history.store
        if store is None:
            raise InvalidRequestError("previous_response_id", previous, SETTING)
        if not 0 < len(previous) <= MAX_ID_LENGTH or previous == f"resp_{self._body.given('request_id')}":
            raise InvalidRequestError("previous_response_id", previous, "must be the id of an earlier response")
        turns = await store.turns(self._history.tenant(self._request), previous, max_bytes)
        return [item for turn in turns for item in turn.items()]

    async def save(self, response: dict[str, Any]) -> None:
        """Stores the response, where that is wanted; `store` of it says whether it is."""
        store = self._history.store
        if store is None or not self.is_stored:
            return
        stored = StoredResponse(
            id=response["id"],
            created_at=response["created_at"],
            previous_id=self._body.previous_response_id,
            input=_as_items(self._body.input, response["id"].removeprefix("resp_")),
            response=response,
        )
        try:
            await store.save(self._history.tenant(self._request), stored)
        except StoreError as error:
            self._history.note_failure(error)
            response["store"] = False


class ResponseHistory:
    """Of one router."""

    def __init__(self, gate: Gate) -> None:
        self.store: ResponseStore | None = None
        """None: nothing is stored."""
        self.num_failures = 0
        """Responses that could not be stored."""
        self.last_failure = ""
        self._gate = gate

    def routes(self) -> list[tuple[str, str, Endpoint]]:
        """Method, path and endpoint of each."""
        return [
            ("GET", PATH, self.get),
            ("DELETE", PATH, self.delete),
            ("GET", f"{PATH}/input_items", self.input_items),
        ]

    def tenant(self, request: Request) -> str:
        """Whose responses the caller may see. Raises `PermissionDeniedError`."""
        caller, named = self._gate.caller(), tenant_of(request)
        if caller.tenant is None:
            return named
        if named not in ("", caller.tenant):
            raise PermissionDeniedError("tenant", f"the key {caller.name!r} may not read responses of another tenant")
        return caller.tenant

    def note_failure(self, error: StoreError) -> None:
        self.num_failures += 1
        self.last_failure = str(error)

    @property
    def warnings(self) -> tuple[str, ...]:
        """For health, once a response could not be stored."""
        if not self.num_failures:
            return ()
        return (f"{self.num_failures} responses could not be stored: {self.last_failure}",)

    async def close(self) -> None:
        if self.store is not None:
            await self.store.close()

    async def get(self, request: Request) -> ASGIApp:
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise InvalidRequestError("stream", True, "must be false: the events of a response are not stored")
        return json_response((await self._stored(request)).response)

    async def delete(self, request: Request) -> ASGIApp:
        response_id = request.path_params["response_id"]
        if self.store is None or len(response_id) > MAX_ID_LENGTH:
            raise NotFoundError("response", response_id)
        await self.store.delete(self.tenant(request), response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> ASGIApp:
        """The input of a response alone, without the turns before it; newest first, unless `order` is `asc`."""
        stored, asked = await self._stored(request), request.query_params
        items = stored.input if _order(asked.get("order", "desc")) else stored.input[::-1]
        if (after := asked.get("after")) is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise InvalidRequestError("after", after, "must be the id of one of the items")
            items = items[ids.index(after) + 1 :]
        return json_response(_page(items, _limit(asked.get("limit", "20"))))

    async def _stored(self, request: Request) -> StoredResponse:
        response_id = request.path_params["response_id"]
        if self.store is None or len(response_id) > MAX_ID_LENGTH:
            raise NotFoundError("response", response_id)
        return await self.store.get(self.tenant(request), response_id)


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


def _order(order: str) -> bool:
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order", order, "must be asc or desc")
    return order == "asc"


def _limit(limit: str) -> int:
    if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MOST_LISTED:
        raise InvalidRequestError("limit", limit, f"must be in [1, {_MOST_LISTED}]")
    return int(limit)


def _page(items: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A list as OpenAI's clients page through it."""
    page = list(items[:limit])
    ids = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, **ids, "has_more": len(items) > limit}

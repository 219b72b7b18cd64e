"""Shared parts of endpoints of stored objects: ids in paths, metadata, and lists in pages."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request

from holdfast.router.store.object_store import MAX_LISTED, Page, is_id
from holdfast.worker.errors import InvalidRequestError, NotFoundError

SETTING: Final = "this server stores nothing; start it with --store FOLDER"

_MAX_METADATA: Final = 16  # pairs, as in OpenAI's API
_MAX_KEY: Final = 64  # characters, as in OpenAI's API
_MAX_VALUE: Final = 512  # characters, as in OpenAI's API


def id_of(request: Request, parameter: str, kind: str) -> str:
    """An id in the path. Raises `NotFoundError` for an object that does not exist."""
    object_id: str = request.path_params[parameter]
    if not is_id(object_id):
        raise NotFoundError(kind, object_id)
    return object_id


def check_metadata(metadata: Mapping[str, Any] | None, field: str = "metadata") -> None:
    """Checks metadata by OpenAI's bounds. Raises `InvalidRequestError`."""
    if metadata is None:
        return
    if len(metadata) > _MAX_METADATA:
        raise InvalidRequestError(field, len(metadata), f"must have at most {_MAX_METADATA} keys")
    for key, value in metadata.items():
        if len(key) > _MAX_KEY:
            raise InvalidRequestError(field, key, f"must have keys of at most {_MAX_KEY} characters")
        if not isinstance(value, str) or len(value) > _MAX_VALUE:
            raise InvalidRequestError(f"{field}.{key}", value, f"must be text of at most {_MAX_VALUE} characters")


def page_asked(query: Mapping[str, str], order: str = "desc", limit: int = 20, most: int = MAX_LISTED) -> Page:
    """Page by `order`, `after` and `limit`; the arguments are the defaults. Raises `InvalidRequestError`."""
    order, said = query.get("order", order), query.get("limit", str(limit))
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order", order, "must be asc or desc")
    if not said.isascii() or not said.isdecimal() or not 1 <= int(said[:9]) <= most:
        raise InvalidRequestError("limit", said, f"must be in [1, {most}]")
    after = query.get("after")
    if after is not None and not is_id(after):
        raise InvalidRequestError("after", after, "must be the id of an object of this list")
    return Page(after=after, limit=int(said), is_ascending=order == "asc")


def listing(found: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page as OpenAI's clients read it."""
    ends = {"first_id": found[0]["id"] if found else None, "last_id": found[-1]["id"] if found else None}
    return {"object": "list", "data": list(found), **ends, "has_more": has_more}


def page_of(items: Sequence[dict[str, Any]], page: Page) -> dict[str, Any]:
    """A page of items that are all here, oldest first. Raises `InvalidRequestError`."""
    rest = list(items) if page.is_ascending else list(items)[::-1]
    if page.after is not None:
        ids = [item["id"] for item in rest]
        if page.after not in ids:
            raise InvalidRequestError("after", page.after, "must be the id of one of the items")
        rest = rest[ids.index(page.after) + 1 :]
    return listing(rest[: page.limit], has_more=len(rest) > page.limit)

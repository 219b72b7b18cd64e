"""Endpoints of `/v1/messages/batches`: Anthropic's batches, whose lines are jobs as those of `/v1/batches` are."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar, Final

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp

from holdfast.router.api.http.answering import Endpoint, json_response
from holdfast.router.api.http.batches import MAX_LINES, BatchEndpoints, job_of, new_batch
from holdfast.router.api.http.conversations import StoredBody
from holdfast.router.api.http.json_body import Listed, Reads
from holdfast.router.api.http.request_origin import check_json_if_any
from holdfast.router.api.http.request_reader import RequestReader
from holdfast.router.api.http.response_history import ResponseHistory
from holdfast.router.api.http.stored_objects import id_of
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.store.batch_store import BATCH, EXPIRED, RUNNING
from holdfast.router.store.file_store import FileStore
from holdfast.router.store.job_store import CANCELLED
from holdfast.router.store.object_store import MAX_LISTED, Page, is_id
from holdfast.worker.errors import InvalidRequestError, NotFoundError

PATH: Final = "/v1/messages/batches"
MESSAGES: Final = "/v1/messages"
_ONE: Final = f"{PATH}/{{message_batch_id}}"
_MAX_CUSTOM_ID: Final = 64  # characters, as in Anthropic's API
_WINDOW_S: Final = 86_400
_NOT_IN_BATCHES: Final = ("stream", "request_id")


class MessageBatchBody(StoredBody):
    """`POST /v1/messages/batches`."""

    lists_of_objects = ("requests",)
    requests: Listed[dict[str, Any]]

    def _check_together(self) -> None:
        if not 0 < len(self.requests) <= MAX_LINES:
            raise InvalidRequestError("requests", len(self.requests), f"must be 1 to {MAX_LINES} requests")
        known: set[str] = set()
        for index, one in enumerate(self.requests):
            field, custom_id, params = f"requests[{index}]", one.get("custom_id"), one.get("params")
            if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_CUSTOM_ID:
                limit = f"must be text of 1 to {_MAX_CUSTOM_ID} characters"
                raise InvalidRequestError(f"{field}.custom_id", custom_id, limit)
            if custom_id in known:
                raise InvalidRequestError(f"{field}.custom_id", custom_id, "is that of a request before")
            known.add(custom_id)
            if not isinstance(params, dict):
                raise InvalidRequestError(f"{field}.params", params, "must be an object")
            if not isinstance(params.get("model"), str | None):
                raise InvalidRequestError(f"{field}.params.model", params["model"], "must be text")
            for name in _NOT_IN_BATCHES:
                if params.get(name):
                    raise InvalidRequestError(f"{field}.params.{name}", params[name], "must not be set in a batch")


class MessageBatchEndpoints:
    """Message batches of one router. Errors are raised as `HoldfastError`."""

    bodies: ClassVar[dict[str, tuple[type[Reads], str]]] = {
        PATH: (MessageBatchBody, "Computes messages in the background.")
    }

    def __init__(
        self,
        request_processor: RequestProcessor,
        reader: RequestReader,
        history: ResponseHistory,
        batches: BatchEndpoints,
    ) -> None:
        """The store of `batches` is theirs too, once it is open."""
        self._requests = request_processor
        self._reader = reader
        self._history = history
        self._batches = batches

    def routes(self) -> list[tuple[str, str, Endpoint]]:
        """Method, path and endpoint of each."""
        return [
            ("POST", PATH, self.create),
            ("GET", PATH, self.listed),
            ("GET", _ONE, self.get),
            ("DELETE", _ONE, self.delete),
            ("POST", f"{_ONE}/cancel", self.cancel),
            ("GET", f"{_ONE}/results", self.results),
        ]

    async def create(self, request: Request) -> ASGIApp:
        """Answers `POST /v1/messages/batches`."""
        content, tenant = await self._reader.content(request), self._history.tenant(request)
        body, _ = await self._reader.decoded(content, MessageBatchBody, lambda one: None)
        self._history.to_write("batch")
        for name in {one["params"].get("model") or "" for one in body.requests}:
            self._requests.model(name)
        store, now = self._batches.opened(), int(time.time())
        batch = new_batch(f"msgbatch_{uuid.uuid4().hex}", MESSAGES, now + _WINDOW_S)
        await store.begin(tenant, batch["id"], {name: f"file-{uuid.uuid4().hex}" for name in ("output", "errors")})
        lines = (json.dumps(_line(one)).encode() for one in body.requests)
        await store.add(
            [job_of(tenant, batch, number, line, self._requests.key_name) for number, line in enumerate(lines, 1)]
        )
        batch |= {"status": RUNNING, "in_progress_at": now}
        batch["request_counts"] = {"total": len(body.requests), "completed": 0, "failed": 0}
        await store.start(tenant, batch)
        self._batches.wake()
        return json_response(_shown(batch))

    async def get(self, request: Request) -> ASGIApp:
        """Answers `GET /v1/messages/batches/{message_batch_id}`."""
        return json_response(_shown(await self._batch(request)))

    async def listed(self, request: Request) -> ASGIApp:
        """Newest first, in pages of `limit`, after `after_id` or before `before_id`."""
        query, tenant = request.query_params, self._history.tenant(request)
        said = query.get("limit", "20")
        if not said.isascii() or not said.isdecimal() or not 1 <= int(said[:9]) <= MAX_LISTED:
            raise InvalidRequestError("limit", said, f"must be in [1, {MAX_LISTED}]")
        before, after = query.get("before_id"), query.get("after_id")
        for name, one in (("before_id", before), ("after_id", after)):
            if one is not None and not is_id(one):
                raise InvalidRequestError(name, one, "must be the id of an object of this list")
        found: list[dict[str, Any]] = []
        has_more = False
        if self._history.store is not None:
            page = Page(after=before or after, limit=int(said), is_ascending=before is not None)
            found, has_more = await self._batches.opened().listed(tenant, page, is_of_messages)
        data = [_shown(one) for one in (reversed(found) if before is not None else found)]
        ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
        return json_response({"data": data, "has_more": has_more, **ends})

    async def cancel(self, request: Request) -> ASGIApp:
        """Ends it: requests without a result are cancelled, and reported as such."""
        check_json_if_any(request)
        batch = await self._batch(request)
        cancelled = await self._batches.opened().cancel(self._history.tenant(request), batch["id"], tells_lines=True)
        return json_response(_shown(cancelled))

    async def delete(self, request: Request) -> ASGIApp:
        """Deletes an ended batch and its results for good."""
        batch = await self._batch(request)
        if batch["status"] == RUNNING:
            raise InvalidRequestError("message_batch_id", batch["id"], "must have ended; cancel it first")
        await self._batches.opened().delete(self._history.tenant(request), batch)
        return json_response({"id": batch["id"], "type": "message_batch_deleted"})

    async def results(self, request: Request) -> ASGIApp:
        """Answers `GET /v1/messages/batches/{message_batch_id}/results`."""
        batch = await self._batch(request)
        if batch["status"] == RUNNING:
            raise InvalidRequestError("message_batch_id", batch["id"], "must have ended before it has results")
        files = FileStore(self._history.required(batch["id"], BATCH).objects)
        stream = _results(files, self._history.tenant(request), batch)
        return StreamingResponse(stream, media_type="application/x-jsonl")

    async def _batch(self, request: Request) -> dict[str, Any]:
        """The batch of a path. Raises `NotFoundError`, also for one of `/v1/batches`."""
        batch_id = id_of(request, "message_batch_id", BATCH)
        self._history.required(batch_id, BATCH)
        batch = await self._batches.opened().get(self._history.tenant(request), batch_id)
        if not is_of_messages(batch):
            raise NotFoundError(BATCH, batch_id)
        return batch


def is_of_messages(batch: Mapping[str, Any]) -> bool:
    """Whether it was made here, and not by `/v1/batches`."""
    return bool(batch["endpoint"] == MESSAGES)


def _line(one: Mapping[str, Any]) -> dict[str, Any]:
    return {"custom_id": one["custom_id"], "method": "POST", "url": MESSAGES, "body": one["params"]}


def _shown(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch as Anthropic's clients read it."""
    counts, status = batch["request_counts"], batch["status"]
    num_left = batch.get("num_left", 0)
    has_ended = status != RUNNING
    ended_at = batch.get(f"{status}_at") if has_ended else None
    return {
        "id": batch["id"],
        "type": "message_batch",
        "processing_status": "ended" if has_ended else "in_progress",
        "request_counts": {
            "processing": 0 if has_ended else counts["total"] - counts["completed"] - counts["failed"],
            "succeeded": counts["completed"],
            "errored": counts["failed"] - num_left,
            "canceled": num_left if status == CANCELLED else 0,
            "expired": num_left if status == EXPIRED else 0,
        },
        "created_at": _time(batch["created_at"]),
        "expires_at": _time(batch["expires_at"]),
        "ended_at": _time(ended_at),
        "cancel_initiated_at": _time(batch.get("cancelled_at")),
        "archived_at": None,
        "results_url": f"{PATH}/{batch['id']}/results" if has_ended else None,
    }


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


async def _results(files: FileStore, tenant: str, batch: Mapping[str, Any]) -> AsyncIterator[bytes]:
    """Lines of both files: the successful ones first."""
    for name in ("output_file_id", "error_file_id"):
        if batch[name] is not None:
            async for line in files.content(tenant, batch[name]):  # each piece is one
                yield json.dumps(_result(json.loads(line))).encode() + b"\n"


def _result(line: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a request, from its line in a file."""
    response, error = line["response"], line["error"]
    if response is not None and response["status_code"] == 200:
        result = {"type": "succeeded", "message": response["body"]}
    elif response is not None:
        result = {"type": "errored", "error": response["body"]}
    else:
        result = {"type": "expired" if error["code"] == "batch_expired" else "canceled"}
    return {"custom_id": line["custom_id"], "result": result}

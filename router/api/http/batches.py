"""Endpoints of `/v1/batches`: requests of a file that are computed in the background, as OpenAI has them."""

import json
import re
import time
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Final

from starlette.requests import Request
from starlette.types import ASGIApp

from holdfast.router.api.http.answering import Endpoint, json_response
from holdfast.router.api.http.batch_lines import BatchLines
from holdfast.router.api.http.conversations import StoredBody
from holdfast.router.api.http.files import checked_expiry, lines_of
from holdfast.router.api.http.json_body import Reads
from holdfast.router.api.http.request_origin import check_json_if_any
from holdfast.router.api.http.request_reader import RequestReader
from holdfast.router.api.http.response_history import ResponseHistory
from holdfast.router.api.http.stored_objects import check_metadata, id_of, listing, page_asked
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.resume import Identity
from holdfast.router.store.batch_store import BATCH, RUNNING, BatchStore
from holdfast.router.store.file_store import FILE, FileStore
from holdfast.router.store.job_store import Job
from holdfast.router.store.object_store import is_id
from holdfast.worker.errors import HoldfastError, InvalidRequestError, NotFoundError

PATH: Final = "/v1/batches"
_ONE: Final = f"{PATH}/{{batch_id}}"

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""Endpoints that a batch's lines may be sent to."""

MAX_LINES: Final = 50_000
MAX_ERRORS: Final = 100
"""Most errors that are listed for a file."""

_OF_BODY: Final = ("input_file_id", "completion_window", "metadata", "output_expires_after")
_MAX_CUSTOM_ID: Final = 512  # characters
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,4})([mhd])")
_WINDOW_UNITS: Final = {"m": 60, "h": 3600, "d": 86400}
_LONGEST_WINDOW_S: Final = 30 * 86400
_ADDED_AT_A_TIME: Final = 500  # jobs
_ADDED_BYTES: Final = 2**20
_ROOM: Final = 2**12
"""Bytes of a line beside its request."""


class BatchBody(StoredBody):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, Any] | None = None
    output_expires_after: dict[str, Any] | None = None

    def _check_together(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise InvalidRequestError("endpoint", self.endpoint, f"must be one of {', '.join(ENDPOINTS)}")
        check_metadata(self.metadata)
        if self.output_expires_after is not None:
            checked_expiry(self.output_expires_after, "output_expires_after")
        self.window_s  # noqa: B018  it is checked

    @property
    def window_s(self) -> int:
        """Raises `InvalidRequestError`."""
        found = _WINDOW.fullmatch(self.completion_window)
        seconds = 0 if found is None else int(found[1]) * _WINDOW_UNITS[found[2]]
        if not 0 < seconds <= _LONGEST_WINDOW_S:
            limit = "must be a number of minutes, hours or days up to 30d, such as 24h"
            raise InvalidRequestError("completion_window", self.completion_window, limit)
        return seconds


class BatchEndpoints:
    """Batch endpoints of one router. Errors are raised as `HoldfastError`."""

    bodies: ClassVar[dict[str, tuple[type[Reads], str]]] = {PATH: (BatchBody, "Computes the requests of a file.")}

    def __init__(
        self, request_processor: RequestProcessor, reader: RequestReader, history: ResponseHistory, max_line_bytes: int
    ) -> None:
        """The body of a line has at most `max_line_bytes`."""
        self._requests = request_processor
        self._reader = reader
        self._history = history
        self._max_line_bytes = max_line_bytes
        self.store: BatchStore | None = None
        """Comes with the history's."""
        self.lines: BatchLines | None = None

    def routes(self) -> list[tuple[str, str, Endpoint]]:
        """Method, path and endpoint of each."""
        return [
            ("POST", PATH, self.create),
            ("GET", PATH, self.listed),
            ("GET", _ONE, self.get),
            ("POST", f"{_ONE}/cancel", self.cancel),
        ]

    async def create(self, request: Request) -> ASGIApp:
        """Answers when the file is read: with a batch that is in progress, or with a failed one and the reason."""
        content, tenant = await self._reader.content(request), self._history.tenant(request)
        body, _ = await self._reader.decoded(content, BatchBody, lambda one: None)
        objects, store = self._history.to_write("batch").objects, self.opened()
        if not is_id(body.input_file_id):
            raise NotFoundError(FILE, body.input_file_id)
        file = await objects.get(tenant, FILE, body.input_file_id)
        if file.object["purpose"] != "batch":
            limit = f"must be a file with the purpose batch, not {file.object['purpose']}"
            raise InvalidRequestError("input_file_id", body.input_file_id, limit)
        batch = new_batch(f"batch_{uuid.uuid4().hex}", body.endpoint, int(time.time()) + body.window_s)
        batch |= {name: getattr(body, name) for name in _OF_BODY}
        ids = {name: f"file-{uuid.uuid4().hex}" for name in ("output", "errors")}
        await store.begin(tenant, batch["id"], ids)
        reading = _Reading(self._requests, body.endpoint, self._max_line_bytes)
        await self._add_lines(reading, tenant, batch, FileStore(objects))
        now = int(time.time())
        if errors := reading.problems():
            batch |= {"status": "failed", "failed_at": now, "errors": {"object": "list", "data": errors}}
            await store.fail(tenant, batch)
            return json_response(batch)
        batch |= {"status": RUNNING, "in_progress_at": now, "model": reading.only_model}
        batch["request_counts"] = {"total": len(reading.custom_ids), "completed": 0, "failed": 0}
        await store.start(tenant, batch)
        self.wake()
        return json_response(batch)

    async def _add_lines(self, reading: "_Reading", tenant: str, batch: dict[str, Any], files: FileStore) -> None:
        jobs, size, number = list[Job](), 0, 0
        async for line in lines_of(files.content(tenant, batch["input_file_id"]), self._max_line_bytes + _ROOM):
            number += 1
            if not line.strip():
                continue
            model = await self._reader.made(len(line), partial(reading.read, number, line))
            if model is not None and reading.takes_model(number, model) and not reading.errors:
                jobs.append(job_of(tenant, batch, number, line, self._requests.key_name))
                size += len(line)
            if len(jobs) == _ADDED_AT_A_TIME or size > _ADDED_BYTES:
                await self.opened().add(jobs)
                jobs, size = [], 0
            if reading.is_enough:
                return
        if jobs and not reading.errors:
            await self.opened().add(jobs)

    async def get(self, request: Request) -> ASGIApp:
        """Answers `GET /v1/batches/{batch_id}`."""
        batch_id = _id_of(request)
        self._history.required(batch_id, BATCH)
        return json_response(await self._batch(request, batch_id))

    async def listed(self, request: Request) -> ASGIApp:
        """Newest first, unless `order` is `asc`."""
        page = page_asked(request.query_params)
        if self._history.store is None:
            return json_response(listing([], has_more=False))
        batches, has_more = await self.opened().listed(self._history.tenant(request), page, _is_ours)
        return json_response(listing(batches, has_more=has_more))

    async def cancel(self, request: Request) -> ASGIApp:
        """Answers `POST /v1/batches/{batch_id}/cancel`."""
        batch_id = _id_of(request)
        check_json_if_any(request)
        self._history.required(batch_id, BATCH)
        await self._batch(request, batch_id)
        return json_response(await self.opened().cancel(self._history.tenant(request), batch_id))

    async def _batch(self, request: Request, batch_id: str) -> dict[str, Any]:
        batch = await self.opened().get(self._history.tenant(request), batch_id)
        if not _is_ours(batch):
            raise NotFoundError(BATCH, batch_id)
        return batch

    def wake(self) -> None:
        """There may be lines."""
        if self.lines is not None:
            self.lines.wake()

    def opened(self) -> BatchStore:
        """The store, which is open."""
        assert self.store is not None, "it is opened with the history's"
        return self.store


def _is_ours(batch: Mapping[str, Any]) -> bool:
    """Whether it was made here, and not by Anthropic's API."""
    return batch["endpoint"] in ENDPOINTS


class _Reading:
    """The lines of one file, as they are checked."""

    def __init__(self, request_processor: RequestProcessor, endpoint: str, max_bytes: int) -> None:
        self.custom_ids: set[str] = set()
        self.errors: list[dict[str, Any]] = []
        self._models: dict[str, str] = {}
        """Fault of each model; empty: none."""
        self._requests = request_processor
        self._endpoint = endpoint
        self._max_bytes = max_bytes

    @property
    def is_enough(self) -> bool:
        """Whether enough faults, or lines, were read."""
        return len(self.errors) >= MAX_ERRORS or len(self.custom_ids) > MAX_LINES

    @property
    def only_model(self) -> str | None:
        return next(iter(self._models)) or None if len(self._models) == 1 else None

    def problems(self) -> list[dict[str, Any]]:
        """Faults in the form of a batch, once all is read."""
        if len(self.custom_ids) > MAX_LINES:
            return [_problem("too_many_tasks", f"the file must have at most {MAX_LINES} lines", None, None)]
        if not self.custom_ids and not self.errors:
            return [_problem("empty_file", "the file must have at least one line", None, None)]
        return self.errors

    def read(self, number: int, line: bytes) -> str | None:
        """The model of line number `number`, empty where it names none; None for a line that is wrong."""
        try:
            return self._model_of(line)
        except _BadLineError as error:
            self.errors.append(_problem(error.code, error.message, error.param, number))
            return None

    def takes_model(self, number: int, name: str) -> bool:
        """Whether the caller may use the model of line number `number`."""
        if name not in self._models:
            self._models[name] = ""
            try:
                self._requests.model(name)
            except HoldfastError as error:
                self._models[name] = str(error)
        if wrong := self._models[name]:
            self.errors.append(_problem("model_not_found", f"body.model: {wrong}", "body.model", number))
        return not wrong

    def _model_of(self, line: bytes) -> str:
        if len(line) > self._max_bytes:
            message = f"the line must have at most {self._max_bytes} bytes (limits.max_message_bytes)"
            raise _BadLineError("line_too_long", message)
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            raise _BadLineError("invalid_json_line", "the line must be JSON") from None
        if not isinstance(said, dict):
            raise _BadLineError("invalid_json_line", "the line must be a JSON object")
        custom_id, body = said.get("custom_id"), said.get("body")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_CUSTOM_ID:
            message = f"custom_id must be text of 1 to {_MAX_CUSTOM_ID} characters"
            raise _BadLineError("missing_required_parameter", message, "custom_id")
        if custom_id in self.custom_ids:
            raise _BadLineError("duplicate_custom_id", f"custom_id {custom_id!r} is that of a line before", "custom_id")
        self.custom_ids.add(custom_id)
        if said.get("method") != "POST":
            raise _BadLineError("invalid_method", "method must be POST", "method")
        if said.get("url") != self._endpoint:
            raise _BadLineError("mismatched_url", f"url must be the batch's endpoint, {self._endpoint}", "url")
        if not isinstance(body, dict):
            raise _BadLineError("missing_required_parameter", "body must be an object", "body")
        for name in ("stream", "background", "request_id"):
            if body.get(name):
                raise _BadLineError("invalid_request", f"body.{name} must not be set in a batch", f"body.{name}")
        model = body.get("model")
        if not isinstance(model, str | None):
            raise _BadLineError("invalid_request", "body.model must be text", "body.model")
        return model or ""


class _BadLineError(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def _problem(code: str, message: str, param: str | None, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}


def new_batch(batch_id: str, endpoint: str, expires_at: int) -> dict[str, Any]:
    """A batch that is being checked, for an endpoint."""
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": batch_id,
        "object": "batch",
        "endpoint": endpoint,
        "model": None,
        "errors": None,
        "input_file_id": None,
        "completion_window": None,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": int(time.time()),
        "expires_at": expires_at,
        **dict.fromkeys((f"{one}_at" for one in times), None),
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": None,
        "output_expires_after": None,
    }


def job_of(tenant: str, batch: Mapping[str, Any], number: int, line: bytes, key_name: str) -> Job:
    """Line number `number` of a batch, at the cost of a key's rates."""
    job_id = f"{batch['id'].partition('_')[2]}-{number}"
    identity = Identity(job_id, batch["created_at"]).text
    return Job(
        tenant=tenant,
        id=job_id,
        object_id=batch["id"],
        number=number,
        content=line,
        identity=identity,
        key_name=key_name,
    )


def _id_of(request: Request) -> str:
    return id_of(request, "batch_id", BATCH)

"""Endpoints of `/v1/files`: uploads that are stored piece by piece, and their contents, in OpenAI's format."""

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar, Final

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp

from holdfast.router.api.http.answering import Endpoint, json_response
from holdfast.router.api.http.response_history import ResponseHistory
from holdfast.router.api.http.stored_objects import id_of, listing, page_asked
from holdfast.router.store.file_store import FILE, PIECE_BYTES, FileStore
from holdfast.router.store.object_store import ObjectStore
from holdfast.worker.errors import InvalidRequestError, MediaTypeError

PATH: Final = "/v1/files"
_ONE: Final = f"{PATH}/{{file_id}}"

MULTIPART: Final = "multipart/form-data"

PURPOSES: Final = ("batch", "assistants", "fine-tune", "vision", "user_data", "evals")
"""`batch` is used here; files of the others are kept."""

EXPIRY_S: Final = (3600, 30 * 86400)
"""Bounds of `expires_after[seconds]`."""

_MAX_FIELD_BYTES: Final = 4096
"""Most bytes of each field beside the file."""

_MAX_FIELDS: Final = 16  # of a multipart body
_MAX_NAME: Final = 512  # characters
_MAX_LISTED: Final = 10_000  # files, as in OpenAI's API


class FileEndpoints:
    """File endpoints of one router. Errors are raised as `HoldfastError`."""

    queries: ClassVar[Mapping[str, tuple[str, ...]]] = {PATH: ("after", "limit", "order", "purpose")}

    def __init__(self, history: ResponseHistory, max_bytes: int) -> None:
        """A file has at most `max_bytes`."""
        self._history = history
        self._max_bytes = max_bytes

    def routes(self) -> list[tuple[str, str, Endpoint]]:
        """Method, path and endpoint of each."""
        return [
            ("POST", PATH, self.create),
            ("GET", PATH, self.listed),
            ("GET", _ONE, self.get),
            ("DELETE", _ONE, self.delete),
            ("GET", f"{_ONE}/content", self.content),
        ]

    async def create(self, request: Request) -> ASGIApp:
        """Answers `POST /v1/files`."""
        form, tenant = _Form(_boundary(request)), self._history.tenant(request)
        files, file_id = FileStore(self._history.to_write("file").objects), f"file-{uuid.uuid4().hex}"
        await files.begin(tenant, file_id)
        try:
            size = await self._received(request, form, files, tenant, file_id)
            file = _described(form, file_id, size)
        except Exception:  # raised again; a cancelled upload is dropped after `UPLOAD_S`
            await files.drop(tenant, file_id)
            raise
        await files.end(tenant, file, file["expires_at"])
        return json_response(file)

    async def _received(self, request: Request, form: "_Form", files: FileStore, tenant: str, file_id: str) -> int:
        """Stores the file's content; returns its size in bytes."""
        size = number = 0
        async for part in request.stream():
            form.push(part)
            if (size := size + form.num_new) > self._max_bytes:
                limit = f"must have at most {self._max_bytes} bytes (router.store_max_file_bytes)"
                raise InvalidRequestError("file", size, limit)
            form.num_new = 0
            if len(form.content) >= PIECE_BYTES:
                await files.add(tenant, file_id, number, form.take())
                number += 1
        form.end()
        if form.content:
            await files.add(tenant, file_id, number, form.take())
        return size

    async def listed(self, request: Request) -> ASGIApp:
        """Newest first, unless `order` is `asc`."""
        query = request.query_params
        page, purpose = page_asked(query, limit=_MAX_LISTED, most=_MAX_LISTED), query.get("purpose")
        if self._history.store is None:
            return json_response(listing([], has_more=False))
        objects, tenant = self._history.store.objects, self._history.tenant(request)
        files, has_more = await objects.listed(tenant, FILE, page, lambda one: purpose in (None, one["purpose"]))
        return json_response(listing(files, has_more=has_more))

    async def get(self, request: Request) -> ASGIApp:
        """Answers `GET /v1/files/{file_id}`."""
        return json_response(await self._file(request))

    async def content(self, request: Request) -> ASGIApp:
        """Answers `GET /v1/files/{file_id}/content`."""
        file, tenant = await self._file(request), self._history.tenant(request)
        pieces = FileStore(self._objects(file["id"])).content(tenant, file["id"])
        headers = {"content-length": str(file["bytes"]), "x-content-type-options": "nosniff"}
        return StreamingResponse(pieces, headers=headers, media_type="application/octet-stream")

    async def delete(self, request: Request) -> ASGIApp:
        """Answers `DELETE /v1/files/{file_id}`."""
        file_id = _id_of(request)
        await self._objects(file_id).delete(self._history.tenant(request), FILE, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def _file(self, request: Request) -> dict[str, Any]:
        file_id = _id_of(request)
        return (await self._objects(file_id).get(self._history.tenant(request), FILE, file_id)).object

    def _objects(self, file_id: str) -> ObjectStore:
        return self._history.required(file_id, FILE).objects


class _Form:
    """Incremental multipart form: its fields, and the received content of its file that was not taken yet."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """None: the file has not come yet."""
        self.content = bytearray()
        self.num_new = 0
        """Bytes of the file that were pushed; its reader sets it back."""
        self._header = self._value = b""
        self._name = ""
        self._is_file = self._is_whole = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._add_to_name,
                    "on_header_value": self._add_to_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_content,
                    "on_part_data": self._add,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise InvalidRequestError("body", "the form", f"must be {MULTIPART}: {error}") from None

    def push(self, data: bytes) -> None:
        """Raises `InvalidRequestError`."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequestError("body", "the form", f"must be {MULTIPART}: {error}") from None

    def end(self) -> None:
        """The body is over. Raises `InvalidRequestError`."""
        if not self._is_whole:
            raise InvalidRequestError("body", "the form", f"must be {MULTIPART}: it ends before its last boundary")
        if self.filename is None:
            raise InvalidRequestError("file", None, "must be a part of the form, with a file name")

    def take(self) -> bytes:
        taken = bytes(self.content)
        self.content.clear()
        return taken

    # --- what the parser finds ---

    def _begin_part(self) -> None:
        self._name, self._is_file = "", False
        if len(self.fields) > _MAX_FIELDS:
            raise InvalidRequestError("body", len(self.fields), f"must have at most {_MAX_FIELDS} fields")

    def _add_to_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_to_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode(errors="replace")
            if b"filename" in options and self._name == "file":
                if self.filename is not None:
                    raise InvalidRequestError("file", "the second", "must be one file")
                self.filename = options[b"filename"].decode(errors="replace")[:_MAX_NAME]
                self._is_file = True
        self._header = self._value = b""

    def _begin_content(self) -> None:
        if not self._is_file:
            self.fields[self._name] = ""

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.content += memoryview(data)[start:end]
            self.num_new += end - start
            return
        text = self.fields[self._name] + data[start:end].decode(errors="replace")
        if len(text) > _MAX_FIELD_BYTES:
            limit = f"must have at most {_MAX_FIELD_BYTES} characters"
            raise InvalidRequestError(self._name or "body", "the field", limit)
        self.fields[self._name] = text

    def _end(self) -> None:
        self._is_whole = True


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind.decode(errors="replace").lower() != MULTIPART or b"boundary" not in options:
        raise MediaTypeError(f"a file is uploaded as {MULTIPART} (`curl -F file=@FILE -F purpose=batch` does)")
    return options[b"boundary"]


def _described(form: _Form, file_id: str, size: int) -> dict[str, Any]:
    """The file object. Raises `InvalidRequestError`."""
    purpose, now = form.fields.get("purpose"), int(time.time())
    if purpose not in PURPOSES:
        raise InvalidRequestError("purpose", purpose, f"must be one of {', '.join(PURPOSES)}")
    after = {
        name: form.fields[f"expires_after[{name}]"]
        for name in ("anchor", "seconds")
        if f"expires_after[{name}]" in form.fields
    }
    seconds = checked_expiry(after, "expires_after") if after else None
    return {
        "id": file_id,
        "object": "file",
        "bytes": size,
        "created_at": now,
        "expires_at": None if seconds is None else now + seconds,
        "filename": form.filename,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }


def checked_expiry(after: Mapping[str, Any], field: str) -> int:
    """The seconds of an expiry policy. Raises `InvalidRequestError`."""
    least, most = EXPIRY_S
    seconds = after.get("seconds")
    if after.get("anchor") != "created_at":
        raise InvalidRequestError(f"{field}.anchor", after.get("anchor"), "must be created_at")
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdecimal() and len(seconds) < 10:
        seconds = int(seconds)
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not least <= seconds <= most:
        raise InvalidRequestError(f"{field}.seconds", seconds, f"must be in [{least}, {most}]")
    return seconds


async def lines_of(pieces: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """Lines of a file, without line breaks; of a longer one than `max_bytes` the first `max_bytes` + 1 bytes."""
    rest = b""
    async for piece in pieces:
        *lines, last = (rest + piece).split(b"\n")
        for line in lines:
            yield line[: max_bytes + 1]
        rest = last if len(last) <= max_bytes else last[: max_bytes + 1]
    if rest:
        yield rest


def _id_of(request: Request) -> str:
    return id_of(request, "file_id", FILE)

"""Reader of HTTP requests: from a request's bytes to its body, off the event loop where that is large,
within bounds. The static bounds of JSON, by field, are one table for all bodies, from `LimitsConfig`; a field that is
not in it has those of `OTHER`.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from starlette.requests import Request
from starlette.types import Message

from holdfast.router.api.chat_answer import SHAPE, ChatPlan
from holdfast.router.api.http.json_body import Reads
from holdfast.router.api.http.request_origin import JSON, check_json
from holdfast.router.api.http.submission import SUBMISSION, Submission, note_reading
from holdfast.router.api.intake import DecodeWorker, arriving
from holdfast.router.config import LimitsConfig
from holdfast.router.request import LIST_LIMITS, GenerationRequest
from holdfast.router.requests.poison_watch import PoisonWatch
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.requests.tracing import TRACEPARENT, note_incoming
from holdfast.router.wire.json_bounds import JsonBounds
from holdfast.router.wire.resume_codec import RESUME
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import Priority
from holdfast.worker.wire.bound import Bound

_OTHER_COUNT, _OTHER_SIZE = 4096, 256 * 2**10
OTHER: Final = Bound(count=_OTHER_COUNT, size=_OTHER_SIZE)
"""Bound of a field without an entry in the table."""

_ESCAPED: Final = 6
"""Bytes of JSON that stand for one byte of text at most."""

_VALUE_BYTES: Final = 2
"""Characters of JSON that a value takes at least, with the comma or the bracket after it."""

_AROUND: Final = 256
"""Values around a shape: its name and options."""

_ID_BYTES: Final = 12
"""Bytes of a token id with comma and space."""


def body_bounds(limits: LimitsConfig) -> JsonBounds:
    """Bounds by field of a body."""
    text = _ESCAPED * limits.max_prompt_bytes
    values = 16 * limits.max_messages
    chat = Bound(count=values, size=text + 64 * values, setting="limits.max_messages, limits.max_prompt_bytes")
    tokens = Bound(
        count=limits.max_prompt_tokens + 2048,
        size=max(text, _ID_BYTES * limits.max_prompt_tokens) + _OTHER_SIZE,
        setting="limits.max_prompt_tokens, limits.max_prompt_bytes",
    )
    grammar = Bound(
        count=max(limits.max_grammar_length // _VALUE_BYTES, limits.max_choices) + _AROUND,
        size=_ESCAPED * limits.max_grammar_length + _OTHER_SIZE,
        setting="limits.max_grammar_length",
    )
    allowed = Bound(
        count=limits.max_allowed_token_ids,
        size=_ID_BYTES * limits.max_allowed_token_ids,
        setting="limits.max_allowed_token_ids",
    )
    bias = Bound(count=limits.max_logit_bias, size=64 * limits.max_logit_bias + 64, setting="limits.max_logit_bias")
    fields = {
        "prompt": Bound(count=2048, size=text + _OTHER_SIZE, setting="limits.max_prompt_bytes"),
        **dict.fromkeys(("messages", "input", "items", "system", "instructions", "tools", "documents"), chat),
        **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), grammar),
        **dict.fromkeys(("response_format", "structured_outputs", "guided_decoding", "text"), grammar),
        **dict.fromkeys(("output_config", "output_format"), grammar),
        "chat_template_kwargs": Bound(count=OTHER.count, size=text),
        "logit_bias": bias,
        "stop_token_ids": Bound(count=limits.max_stop_token_ids, size=OTHER.size, setting="limits.max_stop_token_ids"),
        **{name: _texts(limits, name) for name, limit in LIST_LIMITS.items() if limit.length},
        "stop_sequences": _texts(limits, "stop"),
    }
    whole = Bound(count=limits.max_prompt_tokens + limits.max_allowed_token_ids + 2 * values)
    lists = {**dict.fromkeys(("prompt", "tokens", "input"), tokens), "allowed_token_ids": allowed}
    return JsonBounds(fields, OTHER, whole, string=text, lists=lists)


def _texts(limits: LimitsConfig, parameter: str) -> Bound:
    limit = LIST_LIMITS[parameter]
    count, length = getattr(limits, limit.count), getattr(limits, limit.length)
    return Bound(count=count + 16, size=2 * _ESCAPED * count * length + 1024)


TENANT: Final = "x-tenant"

B = TypeVar("B", bound=Reads)
T = TypeVar("T")


class RequestReader:
    """Reader of one router's requests. Errors are raised as `HoldfastError`."""

    def __init__(
        self,
        request_processor: RequestProcessor,
        limits: LimitsConfig,
        decode_worker: DecodeWorker,
        poison_watch: PoisonWatch,
    ) -> None:
        self.bounds = body_bounds(limits)
        self._requests = request_processor
        self._limits = limits
        self._decode_worker = decode_worker
        self._poison_watch = poison_watch

    def named(self, submission: Submission, request: GenerationRequest) -> Submission:
        """The submission with the id that a body gives its request, if any. Raises `InvalidRequestError`."""
        return submission.named(request.request_id, self._limits)

    async def submission(self, request: Request) -> tuple[Submission, bytes]:
        """Which request it is, and its body's own bytes."""
        note_incoming(request.headers.get(TRACEPARENT, ""))
        # Before the body is read, so that a request that is shed in any case costs no more.
        self._requests.check_overload(Priority.CRITICAL, is_resumed=RESUME in request.headers)
        content = await self.content(request)
        if (known := request.scope.get(SUBMISSION)) is not None:
            return known, content
        read = partial(Submission.read, request.headers, content, self._limits)
        if RESUME in request.headers:  # a resume record follows
            return await self._decode_worker.run(len(content), read)
        return read()

    async def content(self, request: Request) -> bytes:
        """The bytes of a request's body, which must have the content type of JSON, up to the maximum size."""
        check_json(request)
        parts, size, most = [], 0, self._limits.max_message_bytes
        with arriving() as take:
            async for part in request.stream():
                size += len(part)
                if size > most:
                    limit = f"must have at most {most} bytes (limits.max_message_bytes)"
                    raise InvalidRequestError("body", size, limit)
                take(len(part))
                parts.append(part)
        # Off the event loop where it is large: eight bodies of 8 MB that end at once would hold it for 50 ms.
        content = await self._decode_worker.run(size, partial(b"".join, parts))
        note_reading(self._poison_watch, request.url.path, request.headers, content)
        return content

    async def decoded(self, content: bytes, kind: type[B], made_of: Callable[[B], T]) -> tuple[B, T]:
        """A body, decoded off the event loop if it is large. Raises `InvalidRequestError`."""

        def decode() -> tuple[B, T]:
            body = kind.read(content, self.bounds)
            return body, made_of(body)

        return await self._decode_worker.run(len(content), decode)

    async def made(self, num_bytes: int, make: Callable[[], T]) -> T:
        """Result of `make` for a body of `num_bytes` bytes, off the event loop if they are many."""
        return await self._decode_worker.run(num_bytes, make)

    async def plan(self, generation: GenerationRequest, shape_field: str = SHAPE) -> ChatPlan:
        return await ChatPlan.of(generation, self._requests, shape_field=shape_field)


def tenant_of(request: Request) -> str:
    return request.headers.get(TENANT, "")


def own_request(path: str, tenant: str, content: bytes, submission: Submission) -> Request:
    """A request of this process, whose sender does not leave."""
    sent = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Message:
        if not sent:
            await asyncio.Event().wait()
        return sent.pop()

    headers = [(b"content-type", JSON.encode())]
    with suppress(UnicodeEncodeError):  # such a tenant is a key's, and that of the running task
        headers += [(TENANT.encode(), tenant.encode("latin-1"))] if tenant else []
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": headers,
        SUBMISSION: submission,
    }
    return Request(scope, receive)

"""HTTP status codec: converts errors to statuses, and to bodies from which other people's clients raise theirs.

What may not live here: gRPC's statuses (`router/wire/statuses.py`), and when to raise.
"""

import json
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from holdfast.worker.errors import (
    AuthenticationError,
    ByteBudgetError,
    CallerError,
    CapacityError,
    DeadlineExceededError,
    HoldfastError,
    InvalidRequestError,
    ModelPausedError,
    OverloadedError,
    PermissionDeniedError,
    QueueFullError,
    RateLimitError,
    ReplicaError,
    RequestAbortedError,
    RequestQuarantinedError,
    RequestSupersededError,
    UnknownModelError,
    VersionGoneError,
    cut,
)

_BAD: Final = "invalid_request_error"
_CONTEXT: Final = "maximum context length"


class MediaTypeError(CallerError):
    """A body that is not called JSON."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one class of error is answered."""

    status: int
    type: str
    code: str
    may_retry: bool = False
    """Whether clients that retry by themselves should."""


_KINDS: Final[dict[type[HoldfastError], _Kind]] = {
    InvalidRequestError: _Kind(400, _BAD, "invalid_value"),
    UnknownModelError: _Kind(404, _BAD, "model_not_found"),
    AuthenticationError: _Kind(401, _BAD, "invalid_api_key"),
    MediaTypeError: _Kind(415, _BAD, "unsupported_media_type"),
    PermissionDeniedError: _Kind(403, _BAD, "permission_denied"),
    CallerError: _Kind(400, _BAD, "invalid_request"),
    QueueFullError: _Kind(429, "rate_limit_error", "queue_full", may_retry=True),
    RateLimitError: _Kind(429, "rate_limit_error", "rate_limit_exceeded", may_retry=True),
    ByteBudgetError: _Kind(429, "rate_limit_error", "byte_budget", may_retry=True),
    OverloadedError: _Kind(503, "server_error", "overloaded", may_retry=True),
    CapacityError: _Kind(429, "rate_limit_error", "no_capacity", may_retry=True),
    VersionGoneError: _Kind(503, "server_error", "version_gone"),  # sent again as it is, it would end alike
    ModelPausedError: _Kind(503, "server_error", "model_paused", may_retry=True),
    ReplicaError: _Kind(503, "server_error", "replica_unavailable", may_retry=True),
    DeadlineExceededError: _Kind(504, "server_error", "deadline_exceeded"),
    RequestSupersededError: _Kind(409, _BAD, "superseded"),
    RequestAbortedError: _Kind(503, "server_error", "stopping", may_retry=True),
    RequestQuarantinedError: _Kind(500, "server_error", "quarantined"),
    HoldfastError: _Kind(500, "server_error", "internal_error"),
}

_ANTHROPIC: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpError:
    """An error as it is answered."""

    status: int
    message: str
    type: str
    param: str | None
    """The field that is wrong."""
    code: str
    headers: dict[str, str]

    @property
    def may_retry(self) -> bool:
        return self.headers["x-should-retry"] == "true"

    @property
    def openai(self) -> bytes:
        """The body as OpenAI's clients read it."""
        told = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": told}).encode()

    @property
    def anthropic(self) -> bytes:
        """The body as Anthropic's clients read it."""
        kind = _ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return json.dumps({"type": "error", "error": {"type": kind, "message": self.message}}).encode()


def http_error(error: HoldfastError) -> HttpError:
    """The answer to an error, by its most specific class in the table."""
    kind = next(_KINDS[one] for one in type(error).__mro__ if one in _KINDS)
    param, message, code = None, cut(str(error)), kind.code
    if isinstance(error, InvalidRequestError):
        param = error.field
        message = f"{param} {error.limit}" if error.limit.startswith("must") else f"{param}: {error.limit}"
        if _CONTEXT in error.limit:
            code = "context_length_exceeded"
            message = error.limit[0].upper() + error.limit[1:]  # harnesses look for the sentence as vLLM writes it
    elif isinstance(error, UnknownModelError):
        param = "model"
    elif isinstance(error, PermissionDeniedError):
        param = error.field
    headers = {"x-should-retry": "true" if kind.may_retry else "false"}
    if isinstance(error, AuthenticationError):
        headers |= {"www-authenticate": "Bearer"}
    if error.retry_after_s is not None:
        headers |= {"retry-after": f"{max(1, round(error.retry_after_s))}"}
        headers |= {"retry-after-ms": str(round(error.retry_after_s * 1000))}
    return HttpError(status=kind.status, message=message, type=kind.type, param=param, code=code, headers=headers)


def invalid_body(error: ValidationError) -> InvalidRequestError:
    """The first complaint about a request's body."""
    first = error.errors(include_url=False, include_context=False)[0]
    places = [f"[{place}]" if isinstance(place, int) else f".{place}" for place in first["loc"]]
    field = "".join(places).lstrip(".") or "body"
    value = "the body" if first["type"] == "json_invalid" else first["input"]
    return InvalidRequestError(field, value, f"is not valid: {first['msg']}")

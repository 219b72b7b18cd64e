"""HTTP errors: bodies and headers from which the vendors' client libraries raise their exceptions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from holdfast.router.chat import no_text
from holdfast.router.wire.statuses import kind_of
from holdfast.worker.errors import (
    AuthenticationError,
    HoldfastError,
    InvalidRequestError,
    PermissionDeniedError,
    UnknownModelError,
    cut,
)

_TYPES: Final = frozenset(["str", "int", "float", "bool"])
_MEDIA: Final = frozenset(
    [
        *("audio", "audio_url", "file", "image", "image_url", "input_audio", "input_file", "input_image"),
        *("multi_modal_data", "video", "video_url"),
    ]
)
"""Types and names of inputs that are no text."""
_CONTEXT: Final = "maximum context length"

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
    """Status, body and headers of an error response."""

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
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    @property
    def anthropic(self) -> bytes:
        """The body as Anthropic's clients read it."""
        kind = _ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return json.dumps({"type": "error", "error": {"type": kind, "message": self.message}}).encode()


def http_error(error: HoldfastError) -> HttpError:
    """The answer to an error."""
    kind = kind_of(error).http
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
    """The first error of a request's body; for a value that may be of several types, the error of the best-fitting
    one.
    """
    found = error.errors(include_url=False, include_context=False)
    first = max((one for one in found if one["loc"][:1] == found[0]["loc"][:1]), key=lambda one: _fit(one["loc"]))
    places = [
        f"[{place}]" if isinstance(place, int) else f".{place}" for place in first["loc"] if not _is_of_union(place)
    ]
    field = "".join(places).lstrip(".") or "body"
    if (len(places) > 1 or first["type"] != "missing") and (medium := _medium(first["input"])) is not None:
        return no_text(field, medium)
    value = "the body" if first["type"] == "json_invalid" else first["input"]
    return InvalidRequestError(field, value, f"is not valid: {first['msg']}")


def _medium(value: object) -> str | None:
    """The kind of a value that is no text, such as an image; None for any other value."""
    if not isinstance(value, Mapping):
        return None
    parts = value.get("content")
    first = parts[0] if isinstance(parts, list) and parts and isinstance(parts[0], Mapping) else value
    kind = first.get("type")
    return kind if isinstance(kind, str) and kind in _MEDIA else next((name for name in first if name in _MEDIA), None)


def _fit(place: tuple[int | str, ...]) -> tuple[int, int]:
    """Depth to which a value was read before it was found wrong."""
    last = place[-1] if place else 0
    return len(place), last if isinstance(last, int) else -1


def _is_of_union(place: int | str) -> bool:
    """Whether pydantic names one of several types there, and no field."""
    return isinstance(place, str) and (place in _TYPES or "[" in place or place[:1].isupper())

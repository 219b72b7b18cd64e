"""Every error that leaves a Holdfast component, in one tree.

HoldfastError
├── CallerError              the request or the configuration is wrong; a retry cannot help
│   ├── InvalidRequestError      a field of a request (also a ValueError)
│   ├── UnknownModelError        no such model is served here
│   ├── MediaTypeError           a body over HTTP that is not called JSON
│   ├── AuthenticationError      no valid key was sent
│   ├── PermissionDeniedError    the key may not do this
│   ├── ConfigurationError       a setting (also a ValueError)
│   └── UnsupportedModelError    a model that would run wrongly is refused (also a ValueError)
├── CapacityError            no capacity now; try again after `retry_after_s`
│   ├── QueueFullError
│   ├── RateLimitError           the caller's own rate is used up
│   │   └── ByteBudgetError          the bytes that it may have in flight are used up
│   └── OverloadedError          a router protects itself: it refuses or ends what it could serve later
├── ReplicaError             a replica was lost or is not there yet; try again after `retry_after_s`
│   ├── VersionGoneError         the model's version that the output came from is not served any more
│   └── ModelPausedError         operators have paused the model
├── DeadlineExceededError    the caller's own deadline passed
├── RequestAbortedError      the caller went away, or the server is stopping
│   └── RequestSupersededError   the same request id was submitted again
├── RequestQuarantinedError  replicas died under the request again and again; it is not tried any more
├── UpdateRolledBackError    a new version of a model was taken back; the old one serves as before
└── InternalError            our bug
"""

from collections.abc import Iterator
from enum import Enum
from typing import Final

MAX_TEXT_BYTES: Final = 1024
"""Most bytes of an error's text in UTF-8: gRPC sends it in a header, and clients take few bytes of headers."""


class Fault(Enum):
    """Party that caused an error."""

    CALLER = "caller"
    CAPACITY = "capacity"
    REPLICA = "replica"
    BUG = "bug"


class HoldfastError(Exception):
    """Root of the tree. `retry_after_s` is None where a retry cannot help, else the seconds to wait before it."""

    fault: Fault = Fault.BUG
    retry_after_s: float | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross processes. Pickle would make one from its message alone, which most cannot be made from."""
        return _restored, (type(self), self.args, self.__dict__)


class CallerError(HoldfastError):
    """The request or the configuration is wrong; sending it again changes nothing."""

    fault = Fault.CALLER


class MediaTypeError(CallerError):
    """The body of an HTTP request is not called JSON."""


class InvalidRequestError(CallerError, ValueError):
    """A field of a request is outside its limits.

    `field` is the dotted path as in the proto (`sampling_params.top_p`), `limit` the allowed values.
    """

    def __init__(self, field: str, value: object, limit: str) -> None:
        field, limit = cut(field), cut(limit)
        super().__init__(f"{field} = {shortened(value)}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit


_MOST_NAMED: Final = 100  # models in a message


class UnknownModelError(CallerError):
    """The named model is not served here. `served` lists the served models."""

    def __init__(self, model: str, served: tuple[str, ...]) -> None:
        more = f" and {len(served) - _MOST_NAMED} more" if len(served) > _MOST_NAMED else ""
        named = ", ".join(served[:_MOST_NAMED]) or "none"
        super().__init__(f"model {shortened(model)} is not served here; served: {named}{more}")
        self.model = model
        self.served = served


class NotFoundError(CallerError):
    """No object of this id is stored for the caller's tenant. `kind` is the kind of object requested."""

    def __init__(self, kind: str, id: str) -> None:
        super().__init__(f"{kind} {shortened(id)} is not stored")
        self.kind = kind
        self.id = id


class AuthenticationError(CallerError):
    """No valid key was sent. The message is always the same, and does not depend on the request."""


class PermissionDeniedError(CallerError):
    """The caller is known, and may not do this. `field` is that of the request, or the right that is missing."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ConfigurationError(CallerError, ValueError):
    """A setting is wrong. The message names the setting, its value, its source, and the allowed values."""


class UnsupportedModelError(CallerError, ValueError):
    """A model that would run wrongly is refused. The message names the model type, the reason and the way out."""

    def __init__(self, model_type: str, reason: str, way_out: str) -> None:
        super().__init__(f"model type {model_type!r} cannot be served: {reason}. {way_out}")
        self.model_type = model_type
        self.reason = reason
        self.way_out = way_out


class CapacityError(HoldfastError):
    """There is no room now. `retry_after_s` says when to come back."""

    fault = Fault.CAPACITY

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFullError(CapacityError):
    """The bounded queue of a router or a worker is full."""


class RateLimitError(CapacityError):
    """The caller's own rate is used up. Others are not affected."""


class ByteBudgetError(RateLimitError):
    """The bytes of requests that a connection, a key or a router may have in flight are used up. The message names the
    budget and its limit.
    """


class OverloadedError(CapacityError):
    """The router is overloaded: it refuses or ends requests that could be served later. The message names the
    resource.
    """


class ReplicaError(HoldfastError):
    """A replica died, or its model has none. `retry_after_s` says when to come back."""

    fault = Fault.REPLICA

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OnTrialError(ReplicaError):
    """Routers were lost with this request and with another, which is being read now: this one waits for its turn."""


class VersionGoneError(ReplicaError):
    """No replica serves the version that generated the output so far, so the output cannot be continued.

    Another version would go on with other tokens. The request may be made anew, without its output.
    """

    def __init__(self, model: str, version: str, reason: str) -> None:
        super().__init__(
            f"model {model!r}: version {version} is no longer served ({reason}); "
            "its output so far is final; the request can be sent again"
        )
        self.model = model
        self.version = version
        self.reason = reason


class ModelPausedError(ReplicaError):
    """Operators have paused a model. Running requests continue."""

    def __init__(self, model: str, retry_after_s: float) -> None:
        super().__init__(f"model {model!r} is paused by its operators", retry_after_s)
        self.model = model


class DeadlineExceededError(HoldfastError):
    """The deadline that the caller set has passed."""

    fault = Fault.CALLER


class RequestAbortedError(HoldfastError):
    """The caller cancelled, or the server is stopping."""

    fault = Fault.CALLER


class RequestSupersededError(RequestAbortedError):
    """The same request id was submitted again: the newer submission continues, this one ends."""


class RequestQuarantinedError(HoldfastError):
    """Replicas died under the request again and again. It is not tried again, since it would end all of them."""


class StoreError(HoldfastError):
    """The database of stored responses cannot be opened, read or written. The message has its own words."""


class UpdateRolledBackError(HoldfastError):
    """A new version of a model was taken back, and the old one serves as before. The message says why."""

    fault = Fault.REPLICA


class InternalError(HoldfastError):
    """Our bug. The message names the operation; the cause is chained."""


def _restored(kind: type[HoldfastError], args: tuple[object, ...], fields: dict[str, object]) -> HoldfastError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


def shortened(value: object, limit: int = 80) -> str:
    """`repr` of a value cut to `limit` characters, so that a bad megabyte never ends up in a message."""
    text = ""
    for piece in _written(value, limit):
        text += piece
        if len(text) > limit:
            return text[: limit - 3] + "..."
    return text


def _written(value: object, limit: int) -> Iterator[str]:
    """The pieces of a `repr`, made one by one: pieces beyond the maximum length are never made."""
    if type(value) is dict:
        yield "{"
        for index, (name, item) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _written(name, limit)
            yield ": "
            yield from _written(item, limit)
        yield "}"
    elif type(value) is list or type(value) is tuple:
        yield "[" if type(value) is list else "("
        for index, item in enumerate(value):
            yield ", " if index else ""
            yield from _written(item, limit)
        yield "]" if type(value) is list else ",)" if len(value) == 1 else ")"
    else:
        try:
            yield repr(value[:limit] if isinstance(value, str | bytes | list | tuple) else value)
        except ValueError:  # Python does not write out integers of thousands of digits
            yield f"a {type(value).__name__} too large to be shown"


def cut(text: str, most: int = MAX_TEXT_BYTES) -> str:
    """A text of at most `most` bytes in UTF-8: where it is longer, its middle is left out. A compiler's or library's
    message may quote a request in full.
    """
    written = text.encode(errors="replace")
    if len(written) <= most:
        return text
    gap = " [...] "
    end = (most - len(gap)) // 3
    begin = most - len(gap) - end
    return written[:begin].decode(errors="ignore") + gap + written[-end:].decode(errors="ignore")

"""Statuses of errors: the one table for gRPC and HTTP, and the codec of gRPC's, back to the same errors in clients.

Details follow google.rpc: `ErrorInfo` has the class, as a reason that does not depend on the message's wording, and its
fields; `BadRequest` names the invalid field; `RetryInfo` says when to retry (and `grpc-retry-pushback-ms` says it to
gRPC's own retries). A status without details does not come from a router: its code alone decides the error.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from holdfast.worker.errors import (
    AuthenticationError,
    ByteBudgetError,
    CallerError,
    CapacityError,
    ConfigurationError,
    DeadlineExceededError,
    HoldfastError,
    InternalError,
    InvalidRequestError,
    MediaTypeError,
    ModelPausedError,
    NotFoundError,
    OnTrialError,
    OverloadedError,
    PermissionDeniedError,
    QueueFullError,
    RateLimitError,
    ReplicaError,
    RequestAbortedError,
    RequestQuarantinedError,
    RequestSupersededError,
    StoreError,
    UnknownModelError,
    UnsupportedModelError,
    UpdateRolledBackError,
    VersionGoneError,
    cut,
    shortened,
)

DOMAIN: Final = "holdfast"
DETAILS_KEY: Final = "grpc-status-details-bin"
MAX_FIELD_BYTES: Final = 200
"""Most bytes of a field's text. Details travel in a header, and headers are small."""
MAX_LIST_BYTES: Final = 600
"""Maximum bytes of all texts of a list field, as JSON; further texts are left out."""


BAD_REQUEST: Final = "invalid_request_error"
RATE_LIMIT: Final = "rate_limit_error"
SERVER: Final = "server_error"


@dataclass(frozen=True, slots=True)
class Http:
    """HTTP answer to one class of error: the status, and OpenAI's words for it."""

    status: int
    type: str
    code: str
    may_retry: bool = False
    """Whether clients that retry by themselves should."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Encoding of one class of error."""

    code: grpc.StatusCode
    reason: str
    http: Http
    texts: tuple[str, ...] = ()
    """Fields that are strings."""
    lists: tuple[str, ...] = ()
    """Fields that are tuples of strings."""


Code: Final = grpc.StatusCode

KINDS: Final[dict[type[HoldfastError], Kind]] = {
    # Its fields are in `BadRequest`.
    InvalidRequestError: Kind(Code.INVALID_ARGUMENT, "INVALID_REQUEST", Http(400, BAD_REQUEST, "invalid_value")),
    UnknownModelError: Kind(
        Code.NOT_FOUND, "UNKNOWN_MODEL", Http(404, BAD_REQUEST, "model_not_found"), ("model",), ("served",)
    ),
    NotFoundError: Kind(Code.NOT_FOUND, "NOT_FOUND", Http(404, BAD_REQUEST, "not_found"), ("kind", "id")),
    ConfigurationError: Kind(Code.FAILED_PRECONDITION, "CONFIGURATION", Http(400, BAD_REQUEST, "invalid_request")),
    UnsupportedModelError: Kind(
        Code.FAILED_PRECONDITION,
        "UNSUPPORTED_MODEL",
        Http(400, BAD_REQUEST, "invalid_request"),
        ("model_type", "reason", "way_out"),
    ),
    AuthenticationError: Kind(Code.UNAUTHENTICATED, "UNAUTHENTICATED", Http(401, BAD_REQUEST, "invalid_api_key")),
    MediaTypeError: Kind(Code.INVALID_ARGUMENT, "MEDIA_TYPE", Http(415, BAD_REQUEST, "unsupported_media_type")),
    PermissionDeniedError: Kind(
        Code.PERMISSION_DENIED, "PERMISSION_DENIED", Http(403, BAD_REQUEST, "permission_denied"), ("field",)
    ),
    CallerError: Kind(Code.INVALID_ARGUMENT, "CALLER", Http(400, BAD_REQUEST, "invalid_request")),
    QueueFullError: Kind(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", Http(429, RATE_LIMIT, "queue_full", may_retry=True)),
    RateLimitError: Kind(
        Code.RESOURCE_EXHAUSTED, "RATE_LIMIT", Http(429, RATE_LIMIT, "rate_limit_exceeded", may_retry=True)
    ),
    ByteBudgetError: Kind(Code.RESOURCE_EXHAUSTED, "BYTE_BUDGET", Http(429, RATE_LIMIT, "byte_budget", may_retry=True)),
    # Not RESOURCE_EXHAUSTED: another router may have room, and clients go to the next one.
    OverloadedError: Kind(Code.UNAVAILABLE, "OVERLOADED", Http(503, SERVER, "overloaded", may_retry=True)),
    CapacityError: Kind(Code.RESOURCE_EXHAUSTED, "CAPACITY", Http(429, RATE_LIMIT, "no_capacity", may_retry=True)),
    # ABORTED is gRPC's word for "try again, but from the start": sent again as it is, it would end in the same way.
    VersionGoneError: Kind(
        Code.ABORTED, "VERSION_GONE", Http(503, SERVER, "version_gone"), ("model", "version", "reason")
    ),
    ModelPausedError: Kind(
        Code.UNAVAILABLE, "MODEL_PAUSED", Http(503, SERVER, "model_paused", may_retry=True), ("model",)
    ),
    OnTrialError: Kind(Code.UNAVAILABLE, "ON_TRIAL", Http(503, SERVER, "on_trial", may_retry=True)),
    ReplicaError: Kind(
        Code.UNAVAILABLE, "REPLICA_UNAVAILABLE", Http(503, SERVER, "replica_unavailable", may_retry=True)
    ),
    DeadlineExceededError: Kind(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", Http(504, SERVER, "deadline_exceeded")),
    RequestSupersededError: Kind(Code.ABORTED, "SUPERSEDED", Http(409, BAD_REQUEST, "superseded")),
    # A caller that has cancelled gets no status, so this one always means a server that is stopping.
    RequestAbortedError: Kind(Code.UNAVAILABLE, "STOPPING", Http(503, SERVER, "stopping", may_retry=True)),
    RequestQuarantinedError: Kind(Code.INTERNAL, "QUARANTINED", Http(500, SERVER, "quarantined")),
    StoreError: Kind(Code.UNAVAILABLE, "STORE", Http(503, SERVER, "store_failed", may_retry=True)),
    # Of a command, in no router's answer.
    UpdateRolledBackError: Kind(Code.INTERNAL, "UPDATE_ROLLED_BACK", Http(500, SERVER, "internal_error")),
    InternalError: Kind(Code.INTERNAL, "INTERNAL", Http(500, SERVER, "internal_error")),
    HoldfastError: Kind(Code.INTERNAL, "UNCLASSIFIED", Http(500, SERVER, "internal_error")),
}
CLASSES: Final = {kind.reason: error_class for error_class, kind in KINDS.items()}
CLASSES_BY_CODE: Final[dict[grpc.StatusCode, type[HoldfastError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: CallerError,
    grpc.StatusCode.NOT_FOUND: CallerError,
    grpc.StatusCode.FAILED_PRECONDITION: CallerError,
    grpc.StatusCode.UNIMPLEMENTED: CallerError,
    grpc.StatusCode.OUT_OF_RANGE: CallerError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: CallerError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityError,
    grpc.StatusCode.UNAVAILABLE: ReplicaError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.ABORTED: RequestAbortedError,
    grpc.StatusCode.CANCELLED: RequestAbortedError,
}
"""The error for a status without details."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStatus:
    """The status of a failed call: the arguments of `ServicerContext.abort`, which a client receives."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...] = ()

    @property
    def details(self) -> Status | None:
        """The google.rpc details; None if there are none."""
        for key, value in self.trailing_metadata:
            if key == DETAILS_KEY and isinstance(value, bytes):
                return _parsed(value)
        return None


def kind_of(error: HoldfastError) -> Kind:
    """Kind of an error by its most specific class in the table."""
    return next(KINDS[one] for one in type(error).__mro__ if one in KINDS)


def call_status(error: HoldfastError) -> CallStatus:
    """The status of an error."""
    kind = kind_of(error)
    message = cut(str(error))
    status = Status(code=kind.code.value[0], message=message)
    for detail in _details(error, kind):
        status.details.add().Pack(detail)
    trailers: list[tuple[str, str | bytes]] = [(DETAILS_KEY, status.SerializeToString())]
    if error.retry_after_s is not None:
        trailers.append(("grpc-retry-pushback-ms", str(round(error.retry_after_s * 1000))))
    return CallStatus(code=kind.code, message=message, trailing_metadata=tuple(trailers))


def error_of(status: CallStatus) -> HoldfastError:
    """The error of a status: the same class, message and fields as the router's."""
    info, bad, retry = ErrorInfo(), BadRequest(), RetryInfo()
    details = status.details
    for detail in details.details if details is not None else ():
        for form in (info, bad, retry):
            if detail.Is(form.DESCRIPTOR):
                detail.Unpack(form)
    error_class = CLASSES.get(info.reason) if info.domain == DOMAIN else None
    if error_class is None:
        error = _error_by_code(status, has_details=details is not None)
    else:
        error = _made(error_class, status.message, _fields(KINDS[error_class], info.metadata, bad))
    if retry.HasField("retry_delay"):
        error.retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    return error


def _details(error: HoldfastError, kind: Kind) -> list[Message]:
    metadata = {"fault": error.fault.value}
    metadata |= {name: cut(getattr(error, name), MAX_FIELD_BYTES) for name in kind.texts}
    metadata |= {name: json.dumps(_first(getattr(error, name))) for name in kind.lists}
    info = ErrorInfo(reason=kind.reason, domain=DOMAIN, metadata=metadata)
    details: list[Message] = [info]
    if isinstance(error, InvalidRequestError):
        info.metadata["value"] = cut(shortened(error.value), MAX_FIELD_BYTES)
        violation = BadRequest.FieldViolation(field=error.field, description=error.limit)
        details.append(BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(RetryInfo(retry_delay=delay))
    return details


def _first(texts: Sequence[str]) -> list[str]:
    """Texts, up to the maximum size."""
    found, left = list[str](), MAX_LIST_BYTES
    for text in texts:
        short = cut(text, MAX_FIELD_BYTES)
        left -= len(json.dumps(short))
        if left < 0:
            break
        found.append(short)
    return found


def _fields(kind: Kind, metadata: Mapping[str, str], bad: BadRequest) -> dict[str, object]:
    """The fields of an error. Fields that a server of another version leaves out are empty."""
    fields: dict[str, object] = {name: metadata.get(name, "") for name in kind.texts}
    fields |= {name: tuple(json.loads(metadata.get(name, "[]"))) for name in kind.lists}
    if kind is KINDS[InvalidRequestError]:
        violation = bad.field_violations[0] if bad.field_violations else BadRequest.FieldViolation()
        fields |= {"field": violation.field, "limit": violation.description, "value": metadata.get("value", "")}
    return fields


def _made(error_class: type[HoldfastError], message: str, fields: Mapping[str, object]) -> HoldfastError:
    """Constructs an error without `__init__`, which would build another message from the fields."""
    error = error_class.__new__(error_class, message)
    for name, value in fields.items():
        setattr(error, name, value)
    return error


def _error_by_code(status: CallStatus, *, has_details: bool) -> HoldfastError:
    message = status.message or status.code.name
    error_class = CLASSES_BY_CODE.get(status.code)
    if error_class is None:
        return InternalError(f"{status.code.name}: {message}")
    if error_class is ReplicaError and not has_details:
        return ReplicaError(f"no router answers ({message}): is `holdfast serve` running there?")
    return error_class(message)


def _parsed(data: bytes) -> Status | None:
    try:
        return Status.FromString(data)
    except DecodeError:
        return None

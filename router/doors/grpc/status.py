"""The error tree as gRPC statuses: code, message, and details that a program can read.

One table, and nothing else decides codes. Details follow google.rpc: `BadRequest` names the field, `RetryInfo` says
when to come back (and `grpc-retry-pushback-ms` says it to gRPC's own retries), `ErrorInfo` gives a reason that stays
the same when messages are reworded.
"""

from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from holdfast.worker.errors import (
    CallerError,
    CapacityError,
    ConfigurationError,
    DeadlineExceededError,
    HoldfastError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    ReplicaError,
    RequestAbortedError,
    RequestQuarantinedError,
    RequestSupersededError,
    UnknownModelError,
    UnsupportedModelError,
)

DOMAIN: Final = "holdfast"

CODES: Final[dict[type[HoldfastError], tuple[grpc.StatusCode, str]]] = {
    InvalidRequestError: (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    UnknownModelError: (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL"),
    ConfigurationError: (grpc.StatusCode.FAILED_PRECONDITION, "CONFIGURATION"),
    UnsupportedModelError: (grpc.StatusCode.FAILED_PRECONDITION, "UNSUPPORTED_MODEL"),
    CallerError: (grpc.StatusCode.INVALID_ARGUMENT, "CALLER"),
    QueueFullError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    CapacityError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "CAPACITY"),
    ReplicaError: (grpc.StatusCode.UNAVAILABLE, "REPLICA_UNAVAILABLE"),
    DeadlineExceededError: (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    RequestSupersededError: (grpc.StatusCode.ABORTED, "SUPERSEDED"),
    # A caller that has cancelled hears nothing; what is left is a server that is stopping.
    RequestAbortedError: (grpc.StatusCode.UNAVAILABLE, "STOPPING"),
    RequestQuarantinedError: (grpc.StatusCode.INTERNAL, "QUARANTINED"),
    InternalError: (grpc.StatusCode.INTERNAL, "INTERNAL"),
    HoldfastError: (grpc.StatusCode.INTERNAL, "INTERNAL"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStatus:
    """What `ServicerContext.abort` takes."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def call_status(error: HoldfastError) -> CallStatus:
    """The status of an error; the most specific class in the table decides."""
    code, reason = next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)
    status = Status(code=code.value[0], message=str(error))
    for detail in _details(error, reason):
        status.details.add().Pack(detail)
    trailers: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", status.SerializeToString())]
    if error.retry_after_s is not None:
        trailers.append(("grpc-retry-pushback-ms", str(round(error.retry_after_s * 1000))))
    return CallStatus(code=code, message=str(error), trailing_metadata=tuple(trailers))


def _details(error: HoldfastError, reason: str) -> list[Message]:
    details: list[Message] = [ErrorInfo(reason=reason, domain=DOMAIN, metadata={"fault": error.fault.value})]
    if isinstance(error, InvalidRequestError):
        violation = BadRequest.FieldViolation(field=error.field, description=error.limit)
        details.append(BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(RetryInfo(retry_delay=delay))
    return details

"""What a status of gRPC means to a client: an error of our tree, and whether the same call may succeed elsewhere.

What may not live here: channels, messages, time.
"""

from typing import Final

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status

from holdfast.worker.errors import (
    CallerError,
    CapacityError,
    DeadlineExceededError,
    HoldfastError,
    InternalError,
    ReplicaError,
    RequestAbortedError,
    RequestSupersededError,
)

_CALLER_CODES: Final = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.OUT_OF_RANGE,
}
_BROKEN_CODES: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
_BUG_CODES: Final = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
_DEFAULT_RETRY_S: Final = 1.0


def error_of(error: grpc.aio.AioRpcError) -> HoldfastError:
    """The error tree's word for a status."""
    code, message = error.code(), error.details() or error.code().name
    if code in _CALLER_CODES:
        return CallerError(message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return CapacityError(message, _retry_after_s(error))
    if code is grpc.StatusCode.UNAVAILABLE:
        if rpc_status.from_call(error) is None:  # type: ignore[arg-type]  # no router said it: none was reached
            message = f"no router answers ({message}): is `holdfast serve` running there?"
        return ReplicaError(message, _retry_after_s(error))
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceededError(message)
    if code is grpc.StatusCode.ABORTED:
        return RequestSupersededError(message)
    if code is grpc.StatusCode.CANCELLED:
        return RequestAbortedError(message)
    return InternalError(f"{code.name}: {message}")


def is_worth_another_try(error: grpc.aio.AioRpcError, *, was_taken: bool = False) -> bool:
    """Whether the same call may succeed at another router, or later: where a router, a replica or the way was lost.

    A full queue is for the caller to deal with, unless the request `was_taken`: some router has let it in before. The
    codes of a bug count only if nobody said so: then the connection broke in a way of its own.
    """
    if error.code() in _BROKEN_CODES or (was_taken and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED):
        return True
    return error.code() in _BUG_CODES and rpc_status.from_call(error) is None  # type: ignore[arg-type]


def _retry_after_s(error: grpc.aio.AioRpcError) -> float:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # it asks for less than a Call
    info = RetryInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            return float(info.retry_delay.ToTimedelta().total_seconds())
    return _DEFAULT_RETRY_S

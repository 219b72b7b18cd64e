"""Errors to gRPC statuses, with details."""

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from holdfast.router.doors.grpc import status
from holdfast.router.doors.grpc.status import call_status
from holdfast.worker.errors import (
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

STATUSES = [
    (InvalidRequestError("a.b", 0, "must be 1"), "INVALID_ARGUMENT", "INVALID_REQUEST"),
    (UnknownModelError("x", ("m",)), "NOT_FOUND", "UNKNOWN_MODEL"),
    (ConfigurationError("x"), "FAILED_PRECONDITION", "CONFIGURATION"),
    (UnsupportedModelError("t", "r", "w"), "FAILED_PRECONDITION", "UNSUPPORTED_MODEL"),
    (QueueFullError("x", 2.5), "RESOURCE_EXHAUSTED", "QUEUE_FULL"),
    (CapacityError("x"), "RESOURCE_EXHAUSTED", "CAPACITY"),
    (ReplicaError("x"), "UNAVAILABLE", "REPLICA_UNAVAILABLE"),
    (DeadlineExceededError("x"), "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
    (RequestAbortedError("x"), "UNAVAILABLE", "STOPPING"),
    (RequestSupersededError("x"), "ABORTED", "SUPERSEDED"),
    (RequestQuarantinedError("x"), "INTERNAL", "QUARANTINED"),
    (InternalError("x"), "INTERNAL", "INTERNAL"),
]


def every_error(kind=HoldfastError) -> set[type]:
    return {kind}.union(*(every_error(below) for below in kind.__subclasses__()))


@pytest.mark.parametrize(("error", "code", "reason"), STATUSES, ids=lambda value: str(value)[:20])
def test_each_error_has_its_code_and_reason(error, code, reason):
    answer = call_status(error)
    assert answer.code is grpc.StatusCode[code]
    assert answer.message == str(error)
    details = Status.FromString(dict(answer.trailing_metadata)["grpc-status-details-bin"])
    assert (details.code, details.message) == (answer.code.value[0], str(error))
    info = ErrorInfo()
    assert details.details[0].Unpack(info)
    assert (info.reason, info.domain, info.metadata["fault"]) == (reason, "holdfast", error.fault.value)


def test_every_error_of_the_tree_has_a_status():
    assert {kind for kind in every_error() if kind.__module__ == "holdfast.worker.errors"} == status.CODES.keys()


def test_a_bad_field_is_named_in_the_details():
    trailers = dict(call_status(InvalidRequestError("a.b", 0, "must be 1")).trailing_metadata)
    bad = BadRequest()
    assert Status.FromString(trailers["grpc-status-details-bin"]).details[1].Unpack(bad)
    assert [(violation.field, violation.description) for violation in bad.field_violations] == [("a.b", "must be 1")]
    assert "grpc-retry-pushback-ms" not in trailers


def test_what_may_be_tried_again_says_when():
    trailers = dict(call_status(QueueFullError("x", 2.5)).trailing_metadata)
    retry = RetryInfo()
    assert Status.FromString(trailers["grpc-status-details-bin"]).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 2500
    assert trailers["grpc-retry-pushback-ms"] == "2500"

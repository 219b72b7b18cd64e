"""Errors to gRPC statuses, with details, and back."""

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st

from holdfast.router.wire import statuses
from holdfast.router.wire.statuses import CallStatus, call_status, error_of
from holdfast.worker.errors import (
    AuthenticationError,
    CallerError,
    CapacityError,
    ConfigurationError,
    DeadlineExceededError,
    HoldfastError,
    InternalError,
    InvalidRequestError,
    ModelPausedError,
    NotFoundError,
    PermissionDeniedError,
    QueueFullError,
    RateLimitError,
    ReplicaError,
    RequestAbortedError,
    RequestQuarantinedError,
    RequestSupersededError,
    UnknownModelError,
    UnsupportedModelError,
    VersionGoneError,
    shortened,
)

STATUSES = [
    (InvalidRequestError("a.b", 0, "must be 1"), "INVALID_ARGUMENT", "INVALID_REQUEST"),
    (UnknownModelError("x", ("m",)), "NOT_FOUND", "UNKNOWN_MODEL"),
    (ConfigurationError("x"), "FAILED_PRECONDITION", "CONFIGURATION"),
    (UnsupportedModelError("t", "r", "w"), "FAILED_PRECONDITION", "UNSUPPORTED_MODEL"),
    (QueueFullError("x", 2.5), "RESOURCE_EXHAUSTED", "QUEUE_FULL"),
    (RateLimitError("x", 2.5), "RESOURCE_EXHAUSTED", "RATE_LIMIT"),
    (AuthenticationError("x"), "UNAUTHENTICATED", "UNAUTHENTICATED"),
    (PermissionDeniedError("model", "x"), "PERMISSION_DENIED", "PERMISSION_DENIED"),
    (CapacityError("x"), "RESOURCE_EXHAUSTED", "CAPACITY"),
    (VersionGoneError("m", "7ad18da1", "gone"), "ABORTED", "VERSION_GONE"),
    (ModelPausedError("m", 5.0), "UNAVAILABLE", "MODEL_PAUSED"),
    (ReplicaError("x"), "UNAVAILABLE", "REPLICA_UNAVAILABLE"),
    (DeadlineExceededError("x"), "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
    (RequestAbortedError("x"), "UNAVAILABLE", "STOPPING"),
    (RequestSupersededError("x"), "ABORTED", "SUPERSEDED"),
    (RequestQuarantinedError("x"), "INTERNAL", "QUARANTINED"),
    (InternalError("x"), "INTERNAL", "INTERNAL"),
    (CallerError("x"), "INVALID_ARGUMENT", "CALLER"),
    (HoldfastError("x"), "INTERNAL", "UNCLASSIFIED"),
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
    assert {kind for kind in every_error() if kind.__module__ == "holdfast.worker.errors"} == statuses.KINDS.keys()
    assert len(statuses.CLASSES) == len(statuses.KINDS)


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


# --- and back ---

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
pauses = st.integers(0, 10**6).map(lambda ms: ms / 1000)
ERRORS = {
    InvalidRequestError: st.builds(InvalidRequestError, texts, texts | st.integers() | st.floats(), texts),
    UnknownModelError: st.builds(UnknownModelError, texts, st.lists(texts, max_size=3).map(tuple)),
    UnsupportedModelError: st.builds(UnsupportedModelError, texts, texts, texts),
    VersionGoneError: st.builds(VersionGoneError, texts, texts, texts),
    NotFoundError: st.builds(NotFoundError, texts, texts),
    PermissionDeniedError: st.builds(PermissionDeniedError, texts, texts),
    **{
        kind: st.builds(kind, texts, pauses) for kind in (CapacityError, QueueFullError, ReplicaError, ModelPausedError)
    },
}


def told(error: HoldfastError) -> HoldfastError:
    """What a client raises when a router has raised `error`."""
    return error_of(call_status(error))


@pytest.mark.parametrize("kind", statuses.KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_error_comes_back_as_it_was(kind, data):
    error = data.draw(ERRORS.get(kind, st.builds(kind, texts)))
    back = told(error)
    assert type(back) is kind
    assert str(back) == str(error)
    expected = vars(error) | ({"value": shortened(error.value)} if kind is InvalidRequestError else {})
    assert vars(back) == expected
    assert back.retry_after_s == error.retry_after_s


def test_an_error_that_is_a_value_error_is_one_at_the_client_too():
    with pytest.raises(ValueError, match="must be 1"):
        raise told(InvalidRequestError("a.b", 0, "must be 1"))


def test_an_error_of_a_class_that_the_table_does_not_have_comes_as_its_parent():
    class Refusal(InvalidRequestError):
        pass

    back = told(Refusal("a", "x", "no"))
    assert (type(back), back.field, back.value, back.limit) == (InvalidRequestError, "a", "'x'", "no")


def test_details_stay_small_whatever_the_caller_has_sent():
    """They travel in a header: one that is too large would be lost, and the call with it."""
    for error in (InvalidRequestError("text", "x" * 10**6, "no"), UnknownModelError("x" * 10**6, ("m",))):
        ((_, details),) = call_status(error).trailing_metadata
        assert len(details) < 2000
        assert type(told(error)) is type(error)


FOREIGN = [
    ("INVALID_ARGUMENT", CallerError),
    ("NOT_FOUND", CallerError),
    ("FAILED_PRECONDITION", CallerError),
    ("UNIMPLEMENTED", CallerError),
    ("OUT_OF_RANGE", CallerError),
    ("RESOURCE_EXHAUSTED", CapacityError),
    ("UNAVAILABLE", ReplicaError),
    ("DEADLINE_EXCEEDED", DeadlineExceededError),
    ("ABORTED", RequestAbortedError),
    ("CANCELLED", RequestAbortedError),
    ("UNKNOWN", InternalError),
    ("DATA_LOSS", InternalError),
]


@pytest.mark.parametrize(("code", "kind"), FOREIGN)
def test_a_server_that_says_no_details_is_understood_by_its_code(code, kind):
    error = error_of(CallStatus(code=grpc.StatusCode[code], message="so it is"))
    assert type(error) is kind
    assert "so it is" in str(error)
    assert error.retry_after_s == (1.0 if kind in (CapacityError, ReplicaError) else None)


def test_a_server_that_is_not_ours_is_believed_when_to_come_back():
    status = Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="full")
    status.details.add().Pack(ErrorInfo(reason="QUEUE_FULL", domain="elsewhere.example"))
    retry = RetryInfo()
    retry.retry_delay.FromMilliseconds(2500)
    status.details.add().Pack(retry)
    trailers = ((statuses.DETAILS_KEY, status.SerializeToString()),)
    error = error_of(CallStatus(code=grpc.StatusCode.RESOURCE_EXHAUSTED, message="full", trailing_metadata=trailers))
    assert (type(error), error.retry_after_s) == (CapacityError, 2.5)


def test_where_no_router_was_reached_the_error_says_what_to_look_at():
    lost = CallStatus(code=grpc.StatusCode.UNAVAILABLE, message="connection refused")
    assert "holdfast serve" in str(error_of(lost))
    broken = CallStatus(
        code=grpc.StatusCode.UNAVAILABLE, message="x", trailing_metadata=((statuses.DETAILS_KEY, b"\xff"),)
    )
    assert "holdfast serve" in str(error_of(broken))


@pytest.mark.parametrize("value", ["ab", b"q", [1, "b"], (1,), (), {}, {"a": [1, {2: (None, 1.5)}]}, [[[]], {}], {1}])
def test_a_small_value_is_shown_as_python_writes_it(value):
    assert shortened(value) == repr(value)


class Counted:
    """Counts how often a value is written."""

    num_written = 0

    def __repr__(self) -> str:
        Counted.num_written += 1
        return "x"


@pytest.mark.parametrize("large", [[[Counted()] * 10**5], {"a": {index: Counted() for index in range(10**5)}}])
def test_no_more_of_a_large_value_is_written_than_is_shown(large):
    Counted.num_written = 0
    assert len(shortened(large)) == 80
    assert Counted.num_written < 80

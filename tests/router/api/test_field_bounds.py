"""Every field of every API has a static bound: generated from the schemas, so that a new field is tried too."""

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from benchmarks.router_parts.hostile_fields import BODIES, REQUESTS, hostile_bodies, hostile_messages
from holdfast.router.api.http.request_reader import body_bounds
from holdfast.router.config import LimitsConfig
from holdfast.router.wire.bounds import public_bounds
from holdfast.v1 import engine_pb2, inference_pb2
from holdfast.worker.errors import MAX_TEXT_BYTES, InvalidRequestError
from holdfast.worker.wire.link_requests import LINK_BOUNDS
from holdfast.worker.wire.message_bounds import MessageBounds, UnboundedFieldError

LIMITS = LimitsConfig(
    max_prompt_bytes=1000,
    max_prompt_tokens=1000,
    max_messages=16,
    max_allowed_token_ids=1000,
    max_grammar_length=1000,
)
"""Small ones, so that little is beyond them."""
MESSAGE_BYTES = 5 * 2**20
BODY_BYTES = 2**20


def test_a_message_that_is_hostile_in_any_field_is_refused_by_name_before_it_is_parsed():
    bounds, checks, tried = public_bounds(LIMITS), {}, 0
    for hostile in hostile_messages(MESSAGE_BYTES):
        if hostile.api not in checks:
            checks[hostile.api] = MessageBounds.of(REQUESTS[hostile.api], bounds).check
        with pytest.raises(InvalidRequestError) as caught:
            checks[hostile.api](hostile.data)
        assert f"{hostile.field}.".startswith(f"{caught.value.field}."), hostile.api
        assert "must" in caught.value.limit
        assert len(str(caught.value).encode()) < 2 * MAX_TEXT_BYTES
        tried += 1
    assert tried > 200


def test_a_body_that_is_hostile_in_any_field_is_refused_by_name_before_it_is_parsed():
    bounds = body_bounds(LIMITS)
    for hostile in hostile_bodies(BODY_BYTES):
        with pytest.raises(InvalidRequestError) as caught:
            bounds.check(hostile.data)
        assert caught.value.field == hostile.field


def test_bodies_of_every_endpoint_are_tried():
    assert len(BODIES) >= 9


def test_the_link_has_bounds_for_every_field():
    MessageBounds.of(engine_pb2.LinkRequest.DESCRIPTOR, LINK_BOUNDS)


def test_a_field_that_somebody_adds_without_a_bound_is_found():
    """The public messages with one more field in one of them."""
    file = FileDescriptorProto()
    inference_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = "planted.proto", "holdfast.v1"
    (params,) = (one for one in file.message_type if one.name == "SamplingParams")
    assert isinstance(params, DescriptorProto)
    params.field.add(
        name="planted", number=99, label=FieldDescriptorProto.LABEL_REPEATED, type=FieldDescriptorProto.TYPE_STRING
    )
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    planted = pool.FindMessageTypeByName("holdfast.v1.GenerateRequest")
    with pytest.raises(UnboundedFieldError, match=r"SamplingParams\.planted needs a count"):
        MessageBounds.of(planted, public_bounds(LIMITS))

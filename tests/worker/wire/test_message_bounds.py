"""Static bounds of protobuf messages, checked on bytes: what is refused, and what a parser would take is taken."""

import random

import pytest
from google.protobuf.message import DecodeError

from holdfast.foreign import external_processor_pb2 as ext_proc
from holdfast.foreign import grpc_service_pb2 as oip
from holdfast.v1 import inference_pb2 as pb
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.wire.bound import Bound
from holdfast.worker.wire.message_bounds import (
    MAX_DEPTH,
    MAX_FIELDS,
    MAX_UNKNOWN,
    MalformedMessageError,
    MessageBounds,
    UnboundedFieldError,
)

PARAMS = "holdfast.v1.SamplingParams"
BOUNDS = {
    PARAMS: {
        "stop": Bound(count=4, size=10),
        "stop_token_ids": Bound(count=3),
        "logprob_token_ids": Bound(count=3),
        "logit_bias": Bound(count=5, setting="limits.max_logit_bias"),
        "allowed_token_ids": Bound(count=100),
        "bad_words": Bound(count=4, size=10),
    },
    "holdfast.v1.StructuredOutputs": dict.fromkeys(("json", "regex", "grammar"), Bound(size=10)),
    "holdfast.v1.Choice": {"texts": Bound(count=2, size=10)},
}
CHECK = MessageBounds.of(pb.SamplingParams.DESCRIPTOR, BOUNDS).check


def check(message: pb.SamplingParams) -> None:
    CHECK(message.SerializeToString())


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.SamplingParams(stop=["a"] * 5), "stop"),
        (pb.SamplingParams(stop=["a" * 11]), "stop"),
        (pb.SamplingParams(stop=["aaaa"] * 3), "stop"),
        (pb.SamplingParams(stop_token_ids=[1, 2, 3, 4]), "stop_token_ids"),
        (pb.SamplingParams(stop_token_ids=[2**31] * 4), "stop_token_ids"),
        (pb.SamplingParams(allowed_token_ids=[2**31] * 101), "allowed_token_ids"),
        (pb.SamplingParams(logit_bias=dict.fromkeys(range(6), 1.0)), "logit_bias"),
        (pb.SamplingParams(structured_outputs=pb.StructuredOutputs(regex="a" * 11)), "structured_outputs.regex"),
        (
            pb.SamplingParams(structured_outputs=pb.StructuredOutputs(choice=pb.Choice(texts=["a"] * 3))),
            "structured_outputs.choice.texts",
        ),
    ],
)
def test_the_first_field_beyond_its_bound_is_named(message, field):
    with pytest.raises(InvalidRequestError) as caught:
        check(message)
    assert caught.value.field == field


def test_the_refusal_names_the_setting():
    with pytest.raises(InvalidRequestError, match=r"must have at most 5 elements \(limits.max_logit_bias\), not 6"):
        check(pb.SamplingParams(logit_bias=dict.fromkeys(range(6), 1.0)))


def test_what_is_at_its_bound_is_taken():
    check(
        pb.SamplingParams(
            temperature=0.5,
            seed=2**62,
            stop=["aa"] * 4,
            stop_token_ids=[2**31] * 3,
            logit_bias=dict.fromkeys(range(5), 1.0),
            allowed_token_ids=[2**31] * 100,
        )
    )


def test_numbers_count_whether_they_come_packed_or_not():
    one = pb.SamplingParams(stop_token_ids=[7]).SerializeToString()
    single = bytes([7 << 3, 7])
    CHECK(single * 3)
    CHECK(one + single + single)
    assert pb.SamplingParams.FromString(one + single + single).stop_token_ids == [7, 7, 7]
    for data in (single * 4, one * 2 + single * 2):
        with pytest.raises(InvalidRequestError, match="stop_token_ids"):
            CHECK(data)


def test_entries_of_one_key_count_each():
    entry = pb.SamplingParams(logit_bias={7: 1.0}).SerializeToString()
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        CHECK(entry * 6)


def test_fields_inside_several_messages_count_together():
    part = pb.SamplingParams(structured_outputs=pb.StructuredOutputs(choice=pb.Choice(texts=["a"]))).SerializeToString()
    CHECK(part * 2)
    with pytest.raises(InvalidRequestError, match="texts"):
        CHECK(part * 3)


@pytest.mark.parametrize("unknown", [bytes([6 << 3]) + b"\1", bytes([0xFA, 0x3F, 1]) + b"a", bytes([0xF8, 0x3F, 1])])
def test_unknown_fields_have_a_bound(unknown):
    """Also a known number with another wire type, which is unknown to a parser."""
    CHECK(unknown * MAX_UNKNOWN)
    pb.SamplingParams.FromString(unknown * MAX_UNKNOWN)
    with pytest.raises(InvalidRequestError, match="unknown fields"):
        CHECK(unknown * (MAX_UNKNOWN + 1))


def test_a_field_that_comes_again_and_again_is_named():
    with pytest.raises(InvalidRequestError, match=f"top_k = {MAX_FIELDS + 1}"):
        CHECK(pb.SamplingParams(top_k=7).SerializeToString() * (MAX_FIELDS + 1))


def test_messages_inside_each_other_have_a_depth():
    value = ext_proc.Value(number_value=1.0)
    for _ in range(MAX_DEPTH):
        value = ext_proc.Value(list_value=ext_proc.ListValue(values=[value]))
    name = "envoy.service.ext_proc.v3."
    bounds = {
        name + "Value": {"string_value": Bound(size=9)},
        name + "ListValue": {"values": Bound(count=99)},
        name + "Struct": {"fields": Bound(count=99, size=99)},
    }
    deep = MessageBounds.of(ext_proc.Value.DESCRIPTOR, bounds)
    deep.check(value.list_value.values[0].list_value.values[0].SerializeToString()[:0])
    with pytest.raises(InvalidRequestError, match="messages deep"):
        deep.check(value.SerializeToString())


@pytest.mark.parametrize(
    "data",
    [
        b"\x08",
        b"\x32\x05ab",
        b"\x80" * 6,
        b"\x08" + b"\xff" * 11,
        b"\x0b\x0c",  # a group
        b"\x0c",
        b"\x0f\x01",
        b"\x9a\x01\x04\x1a\x05ab",  # a text longer than its message
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    ],
)
def test_what_is_no_message_is_malformed(data):
    with pytest.raises(MalformedMessageError):
        CHECK(data)


def test_whatever_a_parser_takes_within_bounds_the_scan_takes():
    """Bytes of a message, changed at random: what the parser reads and the scan refuses is beyond a bound, and what the
    scan calls malformed the parser refuses, but for groups."""
    message = pb.SamplingParams(
        temperature=0.5,
        stop=["ab", "c"],
        stop_token_ids=[1, 300],
        logit_bias={1: 2.0},
        structured_outputs=pb.StructuredOutputs(choice=pb.Choice(texts=["a"])),
    ).SerializeToString()
    chance, taken, malformed = random.Random(5), 0, 0
    for _ in range(3000):
        data = bytearray(message)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            CHECK(bytes(data))
        except MalformedMessageError as error:
            malformed += 1
            if "groups" not in str(error):
                with pytest.raises(DecodeError):
                    pb.SamplingParams.FromString(bytes(data))
        except InvalidRequestError:
            pass
        else:
            taken += 1
    assert taken > 100
    assert malformed > 100


def test_a_field_that_can_grow_and_has_no_bound_is_a_mistake():
    with pytest.raises(UnboundedFieldError, match=r"SamplingParams\.bad_words needs a count"):
        MessageBounds.of(
            pb.SamplingParams.DESCRIPTOR, BOUNDS | {PARAMS: {**BOUNDS[PARAMS], "bad_words": Bound(size=9)}}
        )
    with pytest.raises(UnboundedFieldError, match=r"SamplingParams\.stop needs a size"):
        MessageBounds.of(pb.SamplingParams.DESCRIPTOR, BOUNDS | {PARAMS: {**BOUNDS[PARAMS], "stop": Bound(count=9)}})
    with pytest.raises(UnboundedFieldError, match=r"parameters needs a size"):
        MessageBounds.of(
            oip.ModelInferRequest.InferRequestedOutputTensor.DESCRIPTOR,
            {
                "inference.ModelInferRequest.InferRequestedOutputTensor": {
                    "name": Bound(size=1),
                    "parameters": Bound(count=9),
                }
            },
        )

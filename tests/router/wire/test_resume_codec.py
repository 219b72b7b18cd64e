"""Resume records and marks: one set of fields in both forms, read within bounds, whatever is in them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.router.config import LimitsConfig
from holdfast.router.resume import MAX_SEQUENCES, Identity, ResumeRecord, SequenceDelta, SequenceRecord
from holdfast.router.wire.resume_codec import (
    MARK,
    MarkWriter,
    StreamFailure,
    failure_line,
    read_mark,
    read_resume_json,
    resume_json,
    resume_message,
    resume_record,
)
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import FinishReason
from tests.examples import examples

MOST = LimitsConfig(max_prompt_tokens=300_000).max_prompt_tokens
SEQUENCE = {"token_ids": [1, 2], "text_length": 4, "finish_reason": None}
RECORD = {"identity": "r 1", "age_s": 0.5, "num_events": 3, "sequences": [SEQUENCE], "system_fingerprint": "f"}

sequence_records = st.builds(
    SequenceRecord,
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=5),
    text_length=st.integers(0, 2**32 - 1),
    finish_reason=st.none() | st.sampled_from(FinishReason),
)
records = st.builds(
    ResumeRecord,
    sequences=st.lists(sequence_records, max_size=3),
    fingerprint=st.text(max_size=8).filter(lambda text: text.isprintable()),
    num_events=st.integers(0, 2**31),
    identity=st.builds(Identity, st.sampled_from(["r", "a b", '"']), st.integers(0, 2**40)),
    age_s=st.integers(0, 2**20).map(lambda ms: ms / 1000),
)


def record(*lengths: int) -> ResumeRecord:
    sequences = [SequenceRecord(token_ids=list(range(length)), text_length=length) for length in lengths]
    return ResumeRecord(identity=Identity("r", 7), sequences=sequences, fingerprint="f", num_events=2, age_s=1.5)


@settings(max_examples=examples(100))
@given(one=records)
def test_both_forms_are_read_as_they_were_written(one: ResumeRecord):
    assert read_resume_json(resume_json(one), MOST) == one
    assert resume_record(resume_message(one)) == ResumeRecord(sequences=one.sequences, fingerprint=one.fingerprint)


def test_json_has_the_names_of_the_message():
    message, sequence = inference_pb2.Resume.DESCRIPTOR, inference_pb2.SequenceProgress.DESCRIPTOR
    written = json.loads(resume_json(record(1)))
    assert {field.name for field in message.fields} == written.keys() - {"identity", "age_s", "num_events"}
    assert {field.name for field in sequence.fields} == written["sequences"][0].keys()
    assert written.keys() == RECORD.keys()


@pytest.mark.parametrize("lengths", [(), (0,), (1,), (3, 0, 70_000), (100_000, 100_000, 100_000)])
def test_a_record_of_any_size_is_read_as_its_client_wrote_it(lengths):
    assert read_resume_json(resume_json(record(*lengths)), MOST) == record(*lengths)


def test_spaces_are_taken():
    assert read_resume_json(json.dumps(RECORD, indent=1).encode(), MOST).sequences[0].token_ids == [1, 2]


def test_more_token_ids_than_a_prompt_may_have_are_refused_by_their_number():
    with pytest.raises(InvalidRequestError, match=r"must have at most 300000 token ids \(limits.max_prompt_tokens\)"):
        read_resume_json(resume_json(record(150_000, 150_001)), MOST)


@pytest.mark.parametrize(
    "tokens", ["[1,2,-3]", "[1,null]", '[1,"x"]', "[[1]]", "[0,1.5]", '"12"', "{}", "[1,,2]", "[1,2", "[0][1]", "7"]
)
def test_what_is_no_list_of_token_ids_is_refused(tokens):
    content = json.dumps(RECORD, separators=(",", ":")).replace("[1,2]", tokens).encode()
    with pytest.raises(InvalidRequestError, match="x-holdfast-resume"):
        read_resume_json(content, MOST)


@pytest.mark.parametrize("filler", ["1", "[]", '"a"', '{"a":1}'])
@pytest.mark.parametrize(
    "field", ["identity", "system_fingerprint", "num_events", "age_s", "sequences", "other", "finish_reason"]
)
def test_no_field_has_more_values_than_a_parser_reads_at_once(field, filler):
    value = "[" + ",".join([filler] * 100_000) + "]"
    content = json.dumps(RECORD)
    if field == "finish_reason":
        content = content.replace('"finish_reason": null', f'"finish_reason": {value}')
    else:
        content = content[:-1] + f', "{field}": {value}}}'
    with pytest.raises(InvalidRequestError, match=r"x-holdfast-resume.*must (have|be)"):
        read_resume_json(content.encode(), MOST)


def marks_of(*lines: bytes) -> list:
    assert all(line.startswith(MARK) and line.endswith(b"\n\n") for line in lines)
    return [read_mark(line[len(MARK) : -2]) for line in lines]


def test_a_record_that_is_merged_from_marks_is_that_of_the_output():
    writer, kept = MarkWriter(), ResumeRecord()
    deltas = [
        SequenceDelta(0, (5, 6), 3, fingerprint="f", num_events=4),
        SequenceDelta(0, (7,), 0, sequence_index=1, fingerprint="f", num_events=5),
        SequenceDelta(2, (), 1, FinishReason.STOP, fingerprint="g", num_events=9),
        SequenceDelta(1, (8,), 2, FinishReason.LENGTH, 1, fingerprint="g", num_events=12, is_last=True),
    ]
    lines = [writer.line(delta) for delta in deltas]
    assert [b"system_fingerprint" in line for line in lines] == [True, False, True, False], "said where it changes"
    assert all(map(kept.merge, marks_of(*lines)))
    assert kept == ResumeRecord(
        sequences=[
            SequenceRecord(token_ids=[5, 6], text_length=4, finish_reason=FinishReason.STOP),
            SequenceRecord(token_ids=[7, 8], text_length=2, finish_reason=FinishReason.LENGTH),
        ],
        fingerprint="g",
        num_events=12,
        is_over=True,
    )


def test_a_failure_says_whether_to_come_again():
    failures = [StreamFailure(True, 1.5), StreamFailure(False, None)]
    assert marks_of(*map(failure_line, failures)) == failures


@pytest.mark.parametrize(
    "mark",
    [
        "",
        "[]",
        "1",
        "{}",
        '{"token_ids":[1]}',
        '{"first_token_index":0}',
        '{"first_token_index":-1,"token_ids":[]}',
        '{"first_token_index":0,"token_ids":"12"}',
        '{"first_token_index":0,"token_ids":[1.5]}',
        '{"first_token_index":0,"token_ids":[],"text_length":"1"}',
        '{"first_token_index":0,"token_ids":[],"finish_reason":"tired"}',
        '{"first_token_index":0,"token_ids":[],"system_fingerprint":7}',
        '{"may_retry":true}',
        '{"may_retry":true,"retry_after_s":"soon"}',
    ],
)
def test_what_no_router_writes_is_no_mark(mark):
    with pytest.raises(ValueError, match="a mark that no router writes"):
        read_mark(mark.encode())


def test_a_part_is_the_record_of_one_prompt_of_a_list():
    whole = record(1, 2, 3)
    assert [len(one.token_ids) for one in whole.part(2, 2).sequences] == [3]
    assert whole.part(4, 2).sequences == []


def test_a_gap_an_overlap_and_an_index_without_end_are_refused_and_a_repeated_end_is_not():
    kept = ResumeRecord()
    kept.merge(SequenceDelta(0, (1,), 1))
    for first in (0, 2):
        with pytest.raises(ValueError, match="does not continue where it was cut off"):
            kept.merge(SequenceDelta(first, (1,), 1))
    with pytest.raises(ValueError, match="at most"):
        kept.merge(SequenceDelta(0, (), 0, sequence_index=MAX_SEQUENCES))
    assert kept.merge(SequenceDelta(1, (2,), 1, FinishReason.STOP))
    assert not kept.merge(SequenceDelta(2, (), 0, FinishReason.STOP))

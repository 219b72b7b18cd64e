"""What a client of a held stream says it has: read within bounds, whatever is in it."""

import json

import pytest

from holdfast.router.api.http.event_ids import read_record
from holdfast.router.config import LimitsConfig
from holdfast.router.resume import Identity, Noted, NotedSequence
from holdfast.worker.errors import InvalidRequestError

LIMITS = LimitsConfig(max_prompt_tokens=300_000)
RECORD = {"id": "r 1", "p": "f", "e": 3, "age": 0.5, "sequences": {"0": {"t": [1, 2], "c": 4, "f": None}}}


def noted(*lengths: int) -> Noted:
    sequences = {index: NotedSequence(list(range(length)), length, None) for index, length in enumerate(lengths)}
    return Noted(identity=Identity("r", 7), sequences=sequences, fingerprint="f", num_events=2, age_s=1.5)


@pytest.mark.parametrize("lengths", [(), (0,), (1,), (3, 0, 70_000), (100_000, 100_000, 100_000)])
def test_a_record_is_read_as_its_client_wrote_it(lengths):
    assert read_record(noted(*lengths).content, LIMITS) == noted(*lengths)


def test_spaces_are_taken():
    assert read_record(json.dumps(RECORD, indent=1).encode(), LIMITS).sequences[0].token_ids == [1, 2]


def test_more_token_ids_than_a_prompt_may_have_are_refused_by_their_number():
    with pytest.raises(InvalidRequestError, match=r"must have at most 300000 token ids \(limits.max_prompt_tokens\)"):
        read_record(noted(150_000, 150_001).content, LIMITS)


@pytest.mark.parametrize(
    "tokens", ["[1,2,-3]", "[1,null]", '[1,"x"]', "[[1]]", "[0,1.5]", '"12"', "{}", "[1,,2]", "[1,2", "[0][1]", "7"]
)
def test_what_is_no_list_of_token_ids_is_refused(tokens):
    content = json.dumps(RECORD, separators=(",", ":")).replace("[1,2]", tokens).encode()
    with pytest.raises(InvalidRequestError, match="x-holdfast-resume"):
        read_record(content, LIMITS)


@pytest.mark.parametrize("filler", ["1", "[]", '"a"', '{"a":1}'])
@pytest.mark.parametrize("field", ["id", "p", "age", "sequences", "other", "f"])
def test_no_field_has_more_values_than_a_parser_reads_at_once(field, filler):
    value = "[" + ",".join([filler] * 100_000) + "]"
    content = json.dumps(RECORD)
    content = (
        content.replace('"f": null', f'"f": {value}') if field == "f" else content[:-1] + f', "{field}": {value}}}'
    )
    with pytest.raises(InvalidRequestError, match=r"x-holdfast-resume.*must (have|be)"):
        read_record(content.encode(), LIMITS)

"""Structured outputs in the router: what is refused, with field and reason, and what reaches the replica."""

import json
from pathlib import Path

import numpy
import pytest

from holdfast.router.config import LimitsConfig
from holdfast.router.text.grammar import GrammarCompiler
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.wire.request_codec import generation_request, sampling_params_message
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.structured_outputs import StructuredOutputs
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_each_loop
from tests.router.site import refusal, request, site

DEMO = Path(__file__).parents[3] / "cluster/bundled_model/model"
FIELD = "sampling_params.structured_outputs"
Wish = inference_pb2.StructuredOutputs

REFUSED = [
    (Wish(json="{"), "json", "cannot be read"),
    (Wish(json='"text"'), "json", "object"),
    (Wish(json='{"type": "array", "uniqueItems": true}'), "json", "uniqueItems"),
    (Wish(json='{"not": {}}'), "json", "not"),
    (Wish(json='{"not": {}, "x-guidance": {"lenient": true}}'), "json", "not"),
    (Wish(json='{"type": "integer", "minimum": 3, "maximum": 1}'), "json", "minimum (3) is greater"),
    (Wish(json='{"$ref": "#/nowhere"}'), "json", "nowhere"),
    (Wish(regex="("), "regex", "unclosed group"),
    (Wish(regex=""), "regex", "not empty"),
    (Wish(choice=inference_pb2.Choice()), "choice", "not empty"),
    (Wish(choice=inference_pb2.Choice(texts=["a", ""])), "choice", "not empty"),
    (Wish(grammar="start: nobody"), "grammar", "nobody"),
    (Wish(grammar="x" * 2000), "grammar", "at most 1000 characters"),
    (Wish(choice=inference_pb2.Choice(texts=["x" * 400] * 3)), "choice", "at most 1000 characters"),
    (Wish(), "", "exactly one"),
    (Wish(json_object=False), "", "exactly one"),
    (Wish(json_object=True), "", "no tokenizer.json"),  # the tokenizer of these tests is none
]


@on_each_loop
async def test_what_cannot_be_enforced_is_refused_by_name_and_the_server_goes_on():
    async with site(await FakeReplica.start(), limits=LimitsConfig(max_grammar_length=1000)) as place:
        for wish, kind, reason in REFUSED:
            params = inference_pb2.SamplingParams(structured_outputs=wish)
            refused = await refusal(
                place.stub.Generate(inference_pb2.GenerateRequest(text="x", sampling_params=params))
            )
            assert refused.code == "INVALID_ARGUMENT", wish
            assert refused.field == (f"{FIELD}.{kind}" if kind else FIELD), wish
            assert reason in refused.message, (wish, refused.message)
        assert place.replicas[0].submits == []
        assert (await place.stub.Generate(request())).usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"regex": "a", "choice": ["a"]}, FIELD),
        ({"json": {}, "json_object": True}, FIELD),
        ({"jason": {}}, f"{FIELD}.jason"),
        ({}, FIELD),
        ({"choice": "yes"}, f"{FIELD}.choice"),
        ({"choice": [3]}, f"{FIELD}.choice"),
        ({"choice": 3}, f"{FIELD}.choice"),
        ({"regex": 5}, f"{FIELD}.regex"),
        ({"regex": 0}, f"{FIELD}.regex"),
        ({"regex": "a\ud800"}, f"{FIELD}.regex"),
        ({"grammar": numpy.array([1, 2])}, f"{FIELD}.grammar"),
        ({"json_object": 1}, f"{FIELD}.json_object"),
        ({5: "a", "b": "c"}, f"{FIELD}.5"),
        ({"json": {"enum": [object()]}}, f"{FIELD}.json"),
    ],
)
def test_what_the_wire_cannot_say_is_refused_in_process(given: dict, field: str):
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(structured_outputs=given)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "wish",
    [
        {"json": '{"type": "object"}'},
        {"json_object": True},
        {"regex": "a+"},
        {"choice": ("yes", "no")},
        {"grammar": 'start: "a"'},
    ],
)
def test_every_kind_survives_the_way_from_the_client_to_the_router(wish: dict):
    params = SamplingParams(structured_outputs=wish)
    message = inference_pb2.GenerateRequest(text="x", sampling_params=sampling_params_message(params))
    received = generation_request(message).sampling_params
    assert received == params
    assert received.structure == StructuredOutputs(**wish)
    assert GrammarCompiler(Tokenizer.load(str(DEMO))).compile(received.structure)


def test_a_schema_may_be_given_as_an_object_or_as_its_text():
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    assert StructuredOutputs(json=schema) == StructuredOutputs(json=json.dumps(schema))
    hash(SamplingParams(structured_outputs={"json": schema}))


def test_vllms_wish_for_no_whitespace_is_what_is_done_anyway():
    assert StructuredOutputs(json={}, disable_any_whitespace=True) == StructuredOutputs(json={})
    with pytest.raises(InvalidRequestError, match="disable_additional_properties"):
        StructuredOutputs(json={}, disable_additional_properties=True)


def test_no_wish_is_no_grammar_and_needs_no_tokenizer():
    assert GrammarCompiler(byte_tokenizer()).compile(None) == ""


def test_a_tokenizer_that_no_mask_can_be_made_for_is_refused(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    tokenizer = byte_tokenizer()
    tokenizer.json_path = tmp_path / "tokenizer.json"
    with pytest.raises(InvalidRequestError, match="this model's tokenizer"):
        GrammarCompiler(tokenizer).compile(StructuredOutputs(json_object=True))

"""Controls on their way from a client to a replica: what is refused, what arrives, and what bad words turn into."""

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.text.tokenizer_registry import bad_word_token_ids
from holdfast.router.wire.request_codec import generation_request, sampling_params_message
from holdfast.v1 import engine_pb2, inference_pb2
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import EngineRequest
from holdfast.worker.sampling_params import PARAMETERS, SamplingParams
from holdfast.worker.wire.link_requests import (
    engine_request,
    submit_message,
)
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_each_loop
from tests.router import sample_tokenizers as sample
from tests.router.site import collected, refusal, request, site

EVERYTHING = SamplingParams(
    seed=1,
    min_p=0.05,
    min_tokens=3,
    repetition_penalty=1.1,
    presence_penalty=-0.3,
    frequency_penalty=0.7,
    logit_bias={5: -1.5, 0: 0.1},
    allowed_token_ids=[7, 5, 0],
    bad_words=["no", "not at all"],
    stop=["."],
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    logprobs=5,
    structured_outputs={"json": {"type": "object"}},
    n=2,
    best_of=5,
    echo=True,
    truncate_prompt_tokens=-1,
)
BEAMS = SamplingParams(
    seed=0, n=2, beam_width=3, length_penalty=0.7, max_tokens=None, ignore_eos=True, stop_token_ids=[4]
)
BEAM_REFUSALS = {
    "best_of": 2,
    "logprobs": 1,
    "prompt_logprobs": 1,
    "min_tokens": 1,
    "stop": ["x"],
    "bad_words": ["x"],
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {1: 1.0},
    "allowed_token_ids": [1],
    "structured_outputs": inference_pb2.StructuredOutputs(regex="a"),
}

BAD = {
    "min_p": [({"min_p": -0.1}, "[0, 1]"), ({"min_p": 1.5}, "[0, 1]"), ({"min_p": float("nan")}, "[0, 1]")],
    "min_tokens": [({"min_tokens": -1}, "negative"), ({"min_tokens": 9, "max_tokens": 8}, "at most max_tokens, 8")],
    "repetition_penalty": [
        ({"repetition_penalty": value}, "[0.01, 100]") for value in (0.0, -1.0, float("inf"), float("nan"))
    ],
    "presence_penalty": [({"presence_penalty": value}, "[-2, 2]") for value in (-2.1, 2.1, float("nan"))],
    "frequency_penalty": [({"frequency_penalty": value}, "[-2, 2]") for value in (-2.1, 2.1, float("nan"))],
    "logit_bias": [
        ({"logit_bias": {3: 100.5}}, "[-100, 100]"),
        ({"logit_bias": {3: float("nan")}}, "[-100, 100]"),
        ({"logit_bias": {256: 1.0}}, "vocabulary size, 256"),
    ],
    "allowed_token_ids": [
        ({"allowed_token_ids": [1, 256]}, "vocabulary size, 256"),
        ({"allowed_token_ids": [1] * 257}, "at most one token id per entry of the vocabulary, 256"),
    ],
    "logprobs": [({"logprobs": -1}, "at most 20 ("), ({"logprobs": 21}, "[0, 20]")],
    "prompt_logprobs": [({"prompt_logprobs": -1}, "at most 20 ("), ({"prompt_logprobs": 21}, "[0, 20]")],
    "n": [
        ({"n": 0}, "at least 1"),
        ({"n": 65}, "at most 64 (limits.max_sequences)"),
        ({"n": 3, "beam_width": 2}, "at most beam_width, 2"),
    ],
    "best_of": [
        ({"best_of": 0}, "at least n, 1"),
        ({"n": 3, "best_of": 2}, "at least n, 3"),
        ({"n": 3, "best_of": 65}, "at most 64 (limits.max_sequences)"),
    ],
    "truncate_prompt_tokens": [({"truncate_prompt_tokens": value}, "at least 1, or -1") for value in (0, -2)],
    "beam_width": [({"beam_width": value}, "[1, 10]") for value in (0, 11)],
    "length_penalty": [({"length_penalty": value}, "[-10, 10]") for value in (10.5, float("nan"), float("inf"))],
    "max_tokens": [({"max_tokens": 5, "no_max_tokens": True}, "no_max_tokens")],
    "bad_words": [
        ({"bad_words": ["a", ""]}, "empty"),
        ({"bad_words": [" "]}, "only spaces"),
        ({"bad_words": ["x"] * 257}, "at most 256 elements"),
        ({"bad_words": ["x" * 257]}, "at most 256 characters"),
    ],
}


@on_each_loop
async def test_bad_values_are_refused_by_name_and_the_server_goes_on():
    async with site(await FakeReplica.start()) as place:
        for name, cases in BAD.items():
            for fields, limit in cases:
                params = inference_pb2.SamplingParams(**fields)
                refused = await refusal(
                    place.stub.Generate(inference_pb2.GenerateRequest(text="x", sampling_params=params))
                )
                assert refused.code == "INVALID_ARGUMENT", fields
                assert refused.field == f"sampling_params.{name}", fields
                assert limit in refused.message, fields
        assert place.replicas[0].submits == []
        assert (await place.stub.Generate(request())).usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("allowed_token_ids", {"allowed_token_ids": []}),
        ("allowed_token_ids", {"allowed_token_ids": [-1]}),
        ("logit_bias", {"logit_bias": {-1: 0.5}}),
    ],
)
def test_what_the_wire_cannot_say_is_refused_in_process(field, given):
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**given)
    assert refused.value.field == f"sampling_params.{field}"


def test_one_bad_word_may_be_given_without_a_list():
    assert SamplingParams(bad_words="no").bad_words == ("no",)


def test_every_parameter_survives_the_way_from_the_client_to_the_router():
    for params in (EVERYTHING, replace(EVERYTHING, prompt_logprobs=4), BEAMS):
        message = inference_pb2.GenerateRequest(text="x", sampling_params=sampling_params_message(params))
        assert generation_request(message).sampling_params == params


def test_message_and_parameters_have_the_same_fields():
    in_message = {field.name for field in inference_pb2.SamplingParams.DESCRIPTOR.fields}
    assert in_message - {"no_max_tokens"} == PARAMETERS.keys()


def test_no_max_tokens_means_as_many_as_fit_and_unset_the_default():
    for fields, max_tokens in (({}, 16), ({"no_max_tokens": True}, None), ({"max_tokens": 3}, 3)):
        message = inference_pb2.GenerateRequest(text="x", sampling_params=inference_pb2.SamplingParams(**fields))
        assert generation_request(message).sampling_params.max_tokens == max_tokens


@on_each_loop
async def test_what_a_beam_search_cannot_heed_is_refused_by_name():
    async with site(await FakeReplica.start()) as place:
        for name, value in BEAM_REFUSALS.items():
            params = inference_pb2.SamplingParams(beam_width=2, **{name: value})
            refused = await refusal(place.stub.Generate(request(sampling_params=params)))
            assert (refused.code, refused.field) == ("INVALID_ARGUMENT", f"sampling_params.{name}")
            assert "beam_width" in refused.message
        assert place.replicas[0].submits == []


@on_each_loop
async def test_what_is_chosen_in_the_end_cannot_be_streamed():
    async with site(await FakeReplica.start()) as place:
        for name, fields in {"best_of": {"n": 2, "best_of": 3}, "beam_width": {"beam_width": 2}}.items():
            params = inference_pb2.SamplingParams(**fields)
            refused = await refusal(collected(place.stub.GenerateStream(request(sampling_params=params))))
            assert (refused.code, refused.field) == ("INVALID_ARGUMENT", f"sampling_params.{name}")
            assert "call Generate" in refused.message
        assert place.replicas[0].submits == []


def test_every_parameter_of_the_token_world_survives_the_link():
    words = ((1, 2), (3,))
    sent = EngineRequest(
        request_id="r",
        prompt_token_ids=(1,),
        sampling_params=EVERYTHING,
        bad_word_token_ids=words,
        grammar="start: /a/",
    )
    submit = submit_message(1, sent).submit
    received = engine_request(engine_pb2.Submit.FromString(submit.SerializeToString()), link="link-1", vocab_size=2**31)
    assert received.bad_word_token_ids == words
    assert received.grammar == sent.grammar
    text_only = {"stop", "bad_words", "include_stop_str_in_output", "skip_special_tokens", "structured_outputs"}
    text_only |= {"n", "best_of", "echo", "truncate_prompt_tokens", "beam_width", "length_penalty", "detokenize"}
    for name in PARAMETERS.keys() - text_only:
        assert getattr(received.sampling_params, name) == getattr(EVERYTHING, name), name


def test_neutral_logits_processors_take_no_room_on_the_link():
    sent = EngineRequest(request_id="r", prompt_token_ids=(1,), sampling_params=SamplingParams(seed=1))
    params = submit_message(1, sent).submit.sampling_params
    assert {field.name for field, _ in params.ListFields()} == {"temperature", "top_p", "seed", "max_tokens"}


@on_each_loop
async def test_bad_words_reach_the_replica_as_tokens():
    async with site(await FakeReplica.start()) as place:
        params = inference_pb2.SamplingParams(bad_words=["no"], max_tokens=2)
        await place.stub.Generate(inference_pb2.GenerateRequest(text="x", sampling_params=params))
        (submit,) = place.replicas[0].submits
        assert [bytes(word.ids) for word in submit.sampling_params.bad_words] == [b"no", b" no"]


# --- bad words ---


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_a_bad_word_is_found_wherever_it_stands(kind: str, root: Path):
    """In a text that the tokenizer itself has encoded, some spelling of the word comes up."""
    tokenizer: Tokenizer = sample.loaded(kind, root)
    spellings = bad_word_token_ids(tokenizer, ["hens"])
    for text in ("hens", "the other hens"):
        token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        assert any(token_ids[-len(spelling) :] == spelling for spelling in spellings), text


def test_spellings_are_not_repeated_and_a_leading_space_of_the_word_does_not_matter():
    spellings = bad_word_token_ids(byte_tokenizer(), ["no", " no", "no"])
    assert [bytes(spelling) for spelling in spellings] == [b"no", b" no"]


def test_a_word_without_tokens_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.encode = lambda text, add_special_tokens: []
    with pytest.raises(InvalidRequestError, match="bad_words"):
        bad_word_token_ids(tokenizer, ["x"])

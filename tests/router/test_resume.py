"""Streams that go on where an earlier one was cut off: no token and no character is lost or repeated."""

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.events import CaughtUp
from holdfast.router.request import GenerationRequest
from holdfast.router.resume import ResumeRecord, SequenceRecord, catch_up, final_delta
from holdfast.router.text.text_stream import TextStream
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.text.tokenizer_registry import TokenizerRegistry
from holdfast.v1 import inference_pb2
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.request import EngineRequest, FinishReason
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import FakeReplica, byte_tokenizer
from tests.loops import on_a_loop, on_each_loop
from tests.router.core import LetterText, facts
from tests.router.processor import processor_and_port
from tests.router.site import collected, expected, refusal, request, site

OUTPUT = "Grüße! ENDE"
DEMO = Path(__file__).parents[2] / "cluster/bundled_model/model"


def resumed(token_ids: list[int], text_length: int, **fields: object) -> inference_pb2.GenerateRequest:
    progress = inference_pb2.SequenceProgress(token_ids=token_ids, text_length=text_length)
    return request(resume=inference_pb2.Resume(sequences=[progress], system_fingerprint=fingerprint()), **fields)


def fingerprint() -> str:
    """Of a `FakeReplica`."""
    return facts(model="fake", vocab_size=256, max_model_len=100_000).fingerprint


@pytest.mark.parametrize("num_tokens", range(len(OUTPUT.encode())))
def test_wherever_it_is_cut_the_text_goes_on_exactly(num_tokens):
    """A character of two bytes, and the beginning of a stop string, are held back at the cut."""
    params = SamplingParams(stop=["ENDEN"], max_tokens=100)
    tokens = tuple(OUTPUT.encode())
    before = TextStream(byte_tokenizer(), params)
    before_cut = before.push(tokens[:num_tokens]).text
    for text_length in {len(before_cut), max(len(before_cut) - 1, 0)}:
        text = TextStream(byte_tokenizer(), params)
        received = SequenceRecord(token_ids=list(tokens[:num_tokens]), text_length=text_length)
        caught_up = catch_up(text, ResumeRecord(sequences=[received]), 0)
        rest = caught_up.unsent_text + text.push(tokens[num_tokens:]).text + text.finish()
        assert before_cut[:text_length] + rest == OUTPUT


def test_unsent_text_leads_the_first_delivery_and_comes_once():
    request = EngineRequest(
        request_id="x", prompt_token_ids=(1,), sampling_params=SamplingParams(seed=0), output_token_ids=(0, 1)
    )
    text = LetterText()
    text.push((0, 1))
    state = RequestState(request=request, model="m", text=text, caught_up=CaughtUp(unsent_text="a", fingerprint="f"))
    first, second = state.take((2,), None), state.take((3,), FinishReason.LENGTH)
    assert (first.first_token_index, first.token_ids, first.text) == (2, (2,), "ab")
    assert second.text == "cd"
    assert second.usage.num_completion_tokens == 4


def test_a_completion_whose_end_was_received_is_over():
    """Its text has what was held back until the end, so it is longer than what is certain after its tokens."""
    text, params = LetterText(), SamplingParams(seed=0, max_tokens=2)
    received = SequenceRecord(token_ids=[0, 1], text_length=2, finish_reason=FinishReason.LENGTH)
    caught_up = catch_up(text, ResumeRecord(sequences=[received], fingerprint="f"), 0)
    request = EngineRequest(request_id="x", prompt_token_ids=(1,), sampling_params=params, output_token_ids=(0, 1))
    end = final_delta(request, caught_up)
    assert (end.finish_reason, end.text, end.token_ids) == (FinishReason.LENGTH, "", ())
    assert end.usage.num_completion_tokens == 2
    with pytest.raises(InvalidRequestError, match="text_length"):
        catch_up(text, ResumeRecord(sequences=[replace(received, finish_reason=None)]), 0)


@on_each_loop
async def test_of_several_completions_those_that_have_ended_are_not_run_again():
    replica = await FakeReplica.start()
    async with site(replica) as place:
        token_ids, text = expected("hello", 1, 8)
        ended = inference_pb2.SequenceProgress(
            token_ids=token_ids, text_length=len(text), finish_reason=inference_pb2.FINISH_REASON_LENGTH
        )
        resume = inference_pb2.Resume(sequences=[ended], system_fingerprint=fingerprint())
        message = request(resume=resume, request_id="x")
        message.sampling_params.n = 2
        chunks = await collected(place.stub.GenerateStream(message))
        assert len(replica.submits) == 1
    again = [chunk for chunk in chunks if chunk.sequence_index == 0]
    assert [(chunk.text, list(chunk.token_ids), chunk.finish_reason) for chunk in again] == [
        ("", [], inference_pb2.FINISH_REASON_LENGTH)
    ]
    assert "".join(chunk.text for chunk in chunks) == expected("hello", 2, 8)[1]
    assert chunks[-1].usage.completion_tokens == 16


@on_each_loop
async def test_a_stream_goes_on_at_another_router():
    async with site(await FakeReplica.start()) as place:
        token_ids, text = expected("hello", 1, 8)
        chunks = await collected(place.stub.GenerateStream(resumed(token_ids[:5], 3)))
        assert chunks[0].first_token_index == 5
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == token_ids[5:]
        assert "".join(chunk.text for chunk in chunks) == text[3:]
        assert chunks[-1].usage.completion_tokens == 8
        assert not chunks[-1].replayed_without_guarantee
        assert chunks[-1].system_fingerprint == fingerprint()


@on_each_loop
async def test_where_the_first_tokens_came_from_elsewhere_the_stream_says_so():
    async with site(await FakeReplica.start()) as place:
        wish = resumed(expected("hello", 1, 8)[0][:5], 5)
        wish.resume.system_fingerprint = "another model"
        assert (await collected(place.stub.GenerateStream(wish)))[-1].replayed_without_guarantee


@on_each_loop
async def test_an_output_that_was_complete_is_ended():
    async with site(await FakeReplica.start()) as place:
        token_ids, text = expected("hello", 1, 8)
        wish = resumed(token_ids[:5], 1)
        wish.sampling_params.stop.append(text[3:5])
        (chunk,) = await collected(place.stub.GenerateStream(wish))
        assert (chunk.first_token_index, chunk.text, chunk.usage.completion_tokens) == (5, text[1:3], 5)
        assert chunk.finish_reason == inference_pb2.FINISH_REASON_STOP


@on_each_loop
async def test_what_cannot_be_a_beginning_of_the_output_is_refused():
    token_ids, text = expected("hello", 1, 8)
    async with site(await FakeReplica.start()) as place:
        for wish, field in (
            (resumed(token_ids[:5], 6), "resume.sequences[0].text_length"),
            (resumed([256], 0), "resume.sequences[0].token_ids"),
            (resumed(token_ids, 0, max_tokens=7), "resume.sequences[0].token_ids"),
            (stopped(resumed(token_ids[:5], 0), text[1:3]), "resume.sequences[0].token_ids"),
            (unseeded(resumed(token_ids[:5], 0)), "request_id"),
            (twofold(resumed(token_ids[:5], 0)), "resume.sequences"),
        ):
            refused = await refusal(collected(place.stub.GenerateStream(wish)))
            assert (refused.code, refused.field) == ("INVALID_ARGUMENT", field)
        refused = await refusal(collected(place.stub.GenerateStream(resumed([1] * 99_996, 0, max_tokens=100_000))))
        assert refused.message.endswith(
            "99996: must have at most 99995 tokens: this model's maximum context length is "
            "100000 tokens, and the prompt has 5"
        )
        refused = await refusal(place.stub.Generate(resumed(token_ids[:5], 0)))
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "resume")


@on_each_loop
async def test_a_greedy_stream_goes_on_without_the_id_that_others_draw_by():
    token_ids, _ = expected("hello", 1, 8)
    async with site(await FakeReplica.start()) as place:
        wish = unseeded(resumed(token_ids[:5], 0))
        wish.sampling_params.temperature = 0
        *_, last = await collected(place.stub.GenerateStream(wish))
        assert last.usage.completion_tokens == 8


def stopped(wish: inference_pb2.GenerateRequest, stop: str) -> inference_pb2.GenerateRequest:
    wish.sampling_params.stop.append(stop)
    return wish


def unseeded(wish: inference_pb2.GenerateRequest) -> inference_pb2.GenerateRequest:
    wish.sampling_params.ClearField("seed")
    return wish


def twofold(wish: inference_pb2.GenerateRequest) -> inference_pb2.GenerateRequest:
    wish.resume.sequences.add()
    return wish


def test_a_text_length_beyond_the_text_names_what_is_certain():
    text = TextStream(byte_tokenizer(), SamplingParams())
    with pytest.raises(InvalidRequestError, match=r"must be in \[0, 2\]"):
        catch_up(text, ResumeRecord(sequences=[SequenceRecord(token_ids=list(b"ab"), text_length=3)]), 0)


END = 0
"""The demo's end of sequence."""


async def opened(params: SamplingParams, *outputs: list[int]) -> list[tuple[int, ...]]:
    """What replicas of the demo are asked for when a client comes with these outputs."""
    tokenizers = TokenizerRegistry(lambda path: Tokenizer.load(str(DEMO)), inline_bytes=100)
    request_processor, port = await processor_and_port(tokenizers, vocab_size=2000, eos_token_ids=frozenset({END}))
    resume = ResumeRecord(sequences=[SequenceRecord(token_ids=output) for output in outputs])
    async with request_processor.open(GenerationRequest(prompt="hi", sampling_params=params, resume=resume)):
        return [request.output_token_ids for request in port.requests]


def letters(text: str) -> list[int]:
    return Tokenizer.load(str(DEMO)).encode(text, add_special_tokens=False)


@on_a_loop
async def test_an_output_that_its_grammar_forbids_is_refused_by_name():
    shaped = SamplingParams(seed=1, max_tokens=20, n=2, structured_outputs={"regex": "[a-c]+d"})
    for output in (letters("ab"), letters("abcd"), [*letters("abcd"), END], []):
        assert await opened(shaped, [], output) == [(), tuple(output)]
    for output, index in (
        (letters("x"), 0),
        ([*letters("ab"), *letters("x")], len(letters("ab"))),
        ([*letters("abcd"), *letters("a")], len(letters("abcd"))),
        ([*letters("ab"), END], len(letters("ab"))),  # it is not fulfilled yet
        ([*letters("ab"), 1999], len(letters("ab"))),  # the model has such an id, and the tokenizer has no such token
    ):
        with pytest.raises(InvalidRequestError, match=f"token {index} is not allowed there") as refused:
            await opened(shaped, [], output)
        assert refused.value.field == "resume.sequences[1].token_ids"


@on_a_loop
async def test_an_output_that_goes_on_after_its_end_is_refused_by_name():
    plain = SamplingParams(seed=1, max_tokens=20, stop_token_ids=[7])
    for end in (END, 7):
        assert await opened(plain, [5, end]) == [(5, end)]
        with pytest.raises(InvalidRequestError, match="must end with token 1, which ends the output") as refused:
            await opened(plain, [5, end, 5])
        assert refused.value.field == "resume.sequences[0].token_ids"
    assert await opened(replace(plain, ignore_eos=True), [5, END, 5]) == [(5, END, 5)]


@on_a_loop
async def test_an_output_longer_than_it_may_become_is_refused_by_name():
    short = SamplingParams(seed=1, max_tokens=2)
    assert await opened(short, [5, 6]) == [(5, 6)]
    with pytest.raises(InvalidRequestError, match=r"resume.sequences\[0\].token_ids = 3: must have at most max_tokens"):
        await opened(short, [5, 6, 7])

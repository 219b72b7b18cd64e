"""From a client's request to what the core is asked, whichever API the client came through."""

import pytest

from holdfast.router.request import GenerationRequest, derived_seed
from holdfast.router.text.tokenizer_registry import TokenizerRegistry
from holdfast.worker.errors import DeadlineExceededError, InvalidRequestError, RequestAbortedError
from holdfast.worker.sampling_params import SamplingParams
from tests.loops import on_a_loop, on_each_loop
from tests.router import sample_tokenizers as sample
from tests.router.processor import processor_and_port


@on_each_loop
async def test_everything_left_open_is_resolved():
    request_processor, port = await processor_and_port()
    async with request_processor.open(GenerationRequest(prompt="hi")) as stream:
        (request,) = port.requests
    assert request.prompt_token_ids == (104, 105)
    assert request.request_id == stream.request.request_id
    assert request.sampling_params.seed == derived_seed(request.request_id)


@on_each_loop
async def test_numbers_that_mean_all_are_brought_down_to_what_there_is():
    """A number that fits no message of the link must not get there."""
    request_processor, port = await processor_and_port(max_model_len=1000)
    params = SamplingParams(max_tokens=2**40, top_k=2**40, seed=1)
    async with request_processor.open(GenerationRequest(prompt="hi", sampling_params=params)):
        (request,) = port.requests
    assert (request.sampling_params.max_tokens, request.sampling_params.top_k) == (1000, 256)


@on_each_loop
async def test_more_tokens_at_least_than_the_model_has_are_refused_in_those_words():
    request_processor, port = await processor_and_port(max_model_len=1000)
    params = SamplingParams(max_tokens=2**40, min_tokens=2**30, seed=1)
    with pytest.raises(InvalidRequestError, match=r"min_tokens .* must be at most 1000, the model's maximum context"):
        async with request_processor.open(GenerationRequest(prompt="hi", sampling_params=params)):
            pass
    assert not port.requests


@on_each_loop
async def test_the_earlier_of_two_deadlines_holds():
    request_processor, _ = await processor_and_port()
    for timeout_s, time_remaining_s in ((0.01, 60), (60, 0.01), (None, 0.01), (0.01, None)):
        with pytest.raises(DeadlineExceededError):  # on a busy machine from opening it already
            async with request_processor.open(
                GenerationRequest(prompt="hi", timeout_s=timeout_s), time_remaining_s
            ) as stream:
                await stream.whole()


@on_each_loop
async def test_the_longest_prompt_leaves_room_for_one_token():
    request_processor, port = await processor_and_port(max_model_len=10)
    async with request_processor.open(GenerationRequest(prompt="x" * 9)):
        assert len(port.requests) == 1
    with pytest.raises(InvalidRequestError, match="maximum context length is 10 tokens; the prompt has 10 tokens"):
        async with request_processor.open(GenerationRequest(prompt="x" * 10)):
            pass


@on_each_loop
async def test_a_closed_processor_opens_nothing_new():
    request_processor, port = await processor_and_port()
    request_processor.close()
    with pytest.raises(RequestAbortedError, match="stopping"):
        async with request_processor.open(GenerationRequest(prompt="hi")):
            pass
    assert port.requests == []


@pytest.mark.parametrize(("kind", "token_ids"), [("byte_level", (0,)), ("byte_fallback", ())])
@on_a_loop
async def test_an_empty_text_is_a_prompt_where_the_tokenizer_begins_every_text(tmp_path, kind, token_ids):
    tokenizers = TokenizerRegistry(lambda path: sample.loaded(kind, tmp_path), inline_bytes=100)
    request_processor, port = await processor_and_port(tokenizers)
    if not token_ids:
        with pytest.raises(InvalidRequestError, match="text = '': the prompt must not be empty"):
            async with request_processor.open(GenerationRequest(prompt="")):
                pass
        return
    async with request_processor.open(GenerationRequest(prompt="")):
        assert [request.prompt_token_ids for request in port.requests] == [token_ids]
    with pytest.raises(InvalidRequestError, match=r"token_ids = .*the prompt must not be empty"):
        async with request_processor.open(GenerationRequest(prompt=())):
            pass

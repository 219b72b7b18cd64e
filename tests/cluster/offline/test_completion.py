"""One request's output as it grows, when a step brings several tokens at once."""

from dataclasses import replace

from holdfast.cluster.offline.completion import Completion
from holdfast.cluster.offline.outputs import RequestOutput
from holdfast.worker.request import EngineRequest, FinishReason, TokenDelta, TokenLogprob
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import byte_tokenizer


def finished(*deltas: TokenDelta, **params) -> RequestOutput:
    request = EngineRequest(
        request_id="r", prompt_token_ids=(1,), sampling_params=SamplingParams(**{"seed": 1, **params})
    )
    completion = Completion(request, None, byte_tokenizer(), None)
    for delta in deltas:
        completion.take(delta)
    return completion.future.result(timeout=0)


def delta(first: int, text: str, finish: FinishReason | None = None) -> TokenDelta:
    token_ids = tuple(text.encode())
    said = tuple(
        TokenLogprob(token_id=token_id, logprob=-0.5, rank=2, top=((ord("z"), -0.25), (token_id, -0.5)))
        for token_id in token_ids
    )
    return TokenDelta(attempt="r", first_token_index=first, token_ids=token_ids, finish_reason=finish, logprobs=said)


def test_a_stop_string_cuts_tokens_and_logprobs_alike():
    output = finished(delta(0, "ab"), delta(2, "c.de"), stop=".", logprobs=2).outputs[0]
    assert (output.text, output.token_ids, output.finish_reason) == ("abc", list(b"abc."), "stop")
    assert [next(iter(said)) for said in output.logprobs] == list(b"abc.")
    assert output.cumulative_logprob == -2.0


def test_a_token_comes_once_with_its_rank_and_its_text():
    (said,) = finished(delta(0, "a", FinishReason.LENGTH), logprobs=2).outputs[0].logprobs
    assert [(item.decoded_token, item.logprob, item.rank) for item in said.values()] == [
        ("a", -0.5, 2),
        ("z", -0.25, 1),
    ]


def test_what_is_said_of_the_prompt_begins_with_nothing():
    first = TokenLogprob(token_id=ord("p"), logprob=-3.0, rank=9, top=((ord("q"), -0.1),))
    last = replace(delta(0, "a", FinishReason.LENGTH), prompt_logprobs=(first,))
    output = finished(last, prompt_logprobs=1)
    nothing, said = output.prompt_logprobs
    assert nothing is None
    assert [(item.decoded_token, item.rank) for item in said.values()] == [("p", 9), ("q", 1)]
    assert finished(delta(0, "a", FinishReason.LENGTH)).prompt_logprobs is None


def test_the_text_goes_on_from_the_prompt():
    """The prompt ends within a character that the output ends."""
    request = EngineRequest(request_id="r", prompt_token_ids=(ord("h"), 0xC3), sampling_params=SamplingParams(seed=1))
    completion = Completion(request, None, byte_tokenizer(), None)
    completion.take(TokenDelta(attempt="r", first_token_index=0, token_ids=(0xA9,), finish_reason=FinishReason.STOP))
    assert completion.future.result(timeout=0).outputs[0].text == "\u00e9"

"""Completions of the router as offline callers see them."""

from holdfast.cluster.offline.request_handle import by_token_id, completion_output, prompt_logprobs
from holdfast.router.generation import OutputDelta
from holdfast.worker.request import TokenLogprob
from holdfast.worker.sampling_params import SamplingParams
from tests.fakes import byte_tokenizer

SAID = TokenLogprob(token_id=ord("a"), logprob=-0.5, rank=2, top=((ord("z"), -0.25), (ord("a"), -0.5)))
DELIVERY = OutputDelta(
    request_id="r",
    first_token_index=0,
    token_ids=(ord("a"),),
    text="a",
    logprobs=(SAID,),
    prompt_logprobs=(
        None,
        TokenLogprob(token_id=ord("p"), logprob=-3.0, rank=9, top=((ord("q"), -0.1),)),
    ),
)


def test_a_token_comes_once_with_its_rank_and_its_text():
    said = by_token_id(SAID, byte_tokenizer())
    assert [(item.decoded_token, item.logprob, item.rank) for item in said.values()] == [
        ("a", -0.5, 2),
        ("z", -0.25, 1),
    ]


def test_what_is_said_of_the_prompt_begins_with_nothing():
    nothing, said = prompt_logprobs(DELIVERY, byte_tokenizer())
    assert nothing is None
    assert [(item.decoded_token, item.rank) for item in said.values()] == [("p", 9), ("q", 1)]


def test_what_was_not_asked_for_is_none():
    output = completion_output(DELIVERY, SamplingParams(), byte_tokenizer())
    assert (output.logprobs, output.cumulative_logprob) == (None, None)

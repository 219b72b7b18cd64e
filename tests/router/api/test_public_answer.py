"""What the core delivers, as clients are told."""

from holdfast.router.api.public_answer import public_chunk, public_generation
from holdfast.router.events import OutputDelta, Usage
from holdfast.router.generation import Chunk, GeneratedSequence, Generation
from holdfast.router.requests.answer import CompletedRequest, CompletedSequence
from holdfast.worker.request import FinishReason, TokenLogprob

SAID = TokenLogprob(token_id=7, logprob=-1.5, rank=3, top=((4, -0.25),))
USAGE = Usage(num_prompt_tokens=2, num_completion_tokens=1)


def test_a_chunk_says_all_that_its_delivery_says():
    delta = OutputDelta(
        request_id="x",
        sequence_index=1,
        first_token_index=3,
        token_ids=(7,),
        text="a",
        finish_reason=FinishReason.STOP,
        usage=USAGE,
        logprobs=(SAID,),
        prompt_logprobs=(SAID,),
        fingerprint="m/tp2",
        identity_guaranteed=False,
    )
    assert public_chunk(delta) == Chunk(
        request_id="x",
        sequence_index=1,
        first_token_index=3,
        token_ids=(7,),
        text="a",
        finish_reason=FinishReason.STOP,
        usage=USAGE,
        logprobs=(SAID,),
        prompt_logprobs=(None, SAID),
        system_fingerprint="m/tp2",
        replayed_without_guarantee=True,
    )


def test_a_chunk_in_the_middle_says_no_more_than_it_knows():
    delta = OutputDelta(request_id="x", first_token_index=3, token_ids=(7, 8), text="ab")
    assert public_chunk(delta) == Chunk(
        request_id="x", first_token_index=3, token_ids=(7, 8), text="ab", finish_reason=None
    )


def test_a_generation_is_as_certain_as_all_of_its_completions():
    outputs = [
        OutputDelta(
            request_id="x",
            sequence_index=index,
            first_token_index=0,
            token_ids=(index,),
            text="ab"[index],
            finish_reason=FinishReason.LENGTH,
            prompt_logprobs=(SAID,) if index == 0 else (),
            fingerprint=f"m/tp{index}",
            identity_guaranteed=index == 0,
        )
        for index in range(2)
    ]
    completions = tuple(CompletedSequence(output=output, cumulative_logprob=-1.0) for output in outputs)
    answer = CompletedRequest(request_id="x", model="m", completions=completions, usage=USAGE)
    assert public_generation(answer) == Generation(
        request_id="x",
        model="m",
        completions=tuple(
            GeneratedSequence(
                sequence_index=index,
                token_ids=(index,),
                text="ab"[index],
                finish_reason=FinishReason.LENGTH,
                cumulative_logprob=-1.0,
            )
            for index in range(2)
        ),
        usage=USAGE,
        prompt_logprobs=(None, SAID),
        replayed_without_guarantee=True,
        system_fingerprint="m/tp0",
    )

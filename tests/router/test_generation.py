"""The finished result of a request, from its completions."""

from holdfast.router.generation import Generation, OutputDelta, Usage
from holdfast.worker.request import FinishReason, TokenLogprob

SAID = TokenLogprob(token_id=7, logprob=-1.5, rank=3, top=((4, -0.25),))


def completion(index: int, **fields: object) -> OutputDelta:
    return OutputDelta("x", 0, (index,), "ab"[index], FinishReason.LENGTH, sequence_index=index, **fields)


def test_a_generation_is_as_certain_as_all_of_its_completions():
    first = completion(0, prompt_logprobs=(None, SAID), system_fingerprint="m/tp0")
    second = completion(1, system_fingerprint="m/tp1", replayed_without_guarantee=True)
    usage = Usage(num_prompt_tokens=2, num_completion_tokens=2)
    whole = Generation(request_id="x", model="m", completions=(first, second), usage=usage)
    assert (whole.prompt_logprobs, whole.system_fingerprint) == ((None, SAID), "m/tp0")
    assert whole.replayed_without_guarantee
    assert not Generation(request_id="x", model="m", completions=(first,), usage=usage).replayed_without_guarantee

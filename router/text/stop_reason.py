"""Stop reason of a sequence: the stop string, or the token among the request's own, that ended it.

A pure function of the request and the output, found again from the tokens, so that no message has to carry it. What may
not live here: whether the output ends.
"""

from collections.abc import Sequence

from holdfast.router.events import Deliver
from holdfast.router.text.text_stream import TextStream
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.request import FinishReason
from holdfast.worker.sampling_params import SamplingParams


def stop_reason(
    tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int], output: Deliver
) -> str | int | None:
    """`output` is the whole output of one sequence. None where the model's own end or a limit has ended it."""
    if output.finish_reason is not FinishReason.STOP:
        return None
    if params.stop_strings:
        text = TextStream(tokenizer, params, prompt_token_ids)
        text.push(output.token_ids)
        if text.matched is not None:
            return text.matched
    last = output.token_ids[-1] if output.token_ids else None
    return last if last in params.stop_token_ids else None

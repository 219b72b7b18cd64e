"""A prompt before it is a request: which of its tokens are kept, and its text where the output begins with it.

Pure functions, for the router and for the engine in one process.
"""

from holdfast.router.text.detokenizer import IncrementalDetokenizer
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.sampling_params import SamplingParams


def kept_tokens(token_ids: tuple[int, ...], params: SamplingParams, max_sequence_len: int) -> tuple[int, ...]:
    """The end of a prompt that `truncate_prompt_tokens` leaves, of a model that takes `max_sequence_len` tokens.

    With -1 that is as much as leaves room for `max_tokens`, or for one token where these are not limited.
    """
    wanted = params.truncate_prompt_tokens
    if wanted is None:
        return token_ids
    num_kept = wanted if wanted > 0 else max(1, max_sequence_len - (params.max_tokens or 1))
    return token_ids[-num_kept:]


def echoed_text(
    tokenizer: Tokenizer, prompt: str | tuple[int, ...], kept: tuple[int, ...], params: SamplingParams
) -> str:
    """The text that `echo` puts before the output: a text prompt as it was given, unless it was cut.

    What the output's own text begins with is left out: a character that the prompt may end in the middle of.
    """
    was_cut = params.truncate_prompt_tokens is not None
    text = prompt if isinstance(prompt, str) and not was_cut else tokenizer.decode(kept, params.skip_special_tokens)
    return text.removesuffix(IncrementalDetokenizer(tokenizer, params.skip_special_tokens, context=kept).finish())

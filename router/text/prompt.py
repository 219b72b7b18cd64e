"""A prompt before it is a request: which of its tokens are kept, whether they fit, and its text where the output begins
with it.

Pure functions, for the router and for the engine in one process.
"""

from collections.abc import Sequence

from holdfast.router.request import EMPTY_PROMPT
from holdfast.router.text.detokenizer import IncrementalDetokenizer
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import InvalidRequestError
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


def check_length(
    field: str, prompt: Sequence[object], num_tokens: int, *, max_sequence_len: int, max_model_len: int
) -> None:
    """A prompt must leave room for one token, and the tokenizer must have made something of it.

    Raises `InvalidRequestError` for `field`, in which the prompt came. The longest sequence is as long as the model's
    context, or as all of the KV cache.
    """
    if num_tokens == 0:
        raise InvalidRequestError(field, prompt, "the prompt has no tokens" if prompt else EMPTY_PROMPT)
    if num_tokens < max_sequence_len:
        return
    length = f"the prompt has {num_tokens} tokens, and at least one more must fit"
    if max_sequence_len == max_model_len:
        limit = f"this model's maximum context length is {max_model_len} tokens; {length}"
    else:
        limit = f"a replica's KV cache holds {max_sequence_len} tokens; {length}"
    raise InvalidRequestError(field, prompt, limit)


def echoed_text(
    tokenizer: Tokenizer, prompt: str | tuple[int, ...], kept: tuple[int, ...], params: SamplingParams
) -> str:
    """The text that `echo` puts before the output: a text prompt as it was given, unless it was cut.

    What the output's own text begins with is left out: a character that the prompt may end in the middle of.
    """
    was_cut = params.truncate_prompt_tokens is not None
    text = prompt if isinstance(prompt, str) and not was_cut else tokenizer.decode(kept, params.skip_special_tokens)
    return text.removesuffix(IncrementalDetokenizer(tokenizer, params.skip_special_tokens, context=kept).finish())

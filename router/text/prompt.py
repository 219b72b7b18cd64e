"""Prompt preprocessing: truncation, the length check, and the text of `echo`.

Pure functions, for the router and for the offline engine. What may not live here: tokenization (`tokenizer.py`).
"""

from collections.abc import Sequence
from typing import Final

from holdfast.router.request import EMPTY_PROMPT
from holdfast.router.text.detokenizer import IncrementalDetokenizer
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import InvalidRequestError
from holdfast.worker.sampling_params import SamplingParams

MAX_PROMPT_LOGPROBS_BYTES: Final = 16 * 2**20
"""Of one prompt. A link's messages have at most 64 MiB, and several prompts may end in one step."""

_LOGPROB_BYTES: Final = 32
_CANDIDATE_BYTES: Final = 10
"""Of a token and of each of its candidates in a message, at most: an id of five bytes, a number of four."""


def kept_tokens(token_ids: tuple[int, ...], params: SamplingParams, max_sequence_len: int) -> tuple[int, ...]:
    """The prompt's tokens that `truncate_prompt_tokens` keeps: its last ones, or with `truncate_right` its first ones.

    With -1 it keeps as many as leave room for `max_tokens` within `max_sequence_len`, or for one without a limit.
    """
    wanted = params.truncate_prompt_tokens
    assert wanted is not None, "nothing is to be cut"
    num_kept = wanted if wanted > 0 else max(1, max_sequence_len - (params.max_tokens or 1))
    return token_ids[:num_kept] if params.truncate_right else token_ids[-num_kept:]


def check_length(
    field: str, prompt: Sequence[object], num_tokens: int, *, max_sequence_len: int, max_model_len: int
) -> None:
    """Raises `InvalidRequestError` for `field` unless the prompt has tokens and leaves room for one more.

    `max_sequence_len` is the model's context length, or the capacity of the KV cache if that is smaller.
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


def check_prompt_logprobs(params: SamplingParams, num_tokens: int) -> None:
    """Raises `InvalidRequestError` where the prompt's log-probabilities would not fit one message of a replica."""
    assert params.prompt_logprobs is not None, "they were asked for"
    size = num_tokens * (_LOGPROB_BYTES + _CANDIDATE_BYTES * params.prompt_logprobs)
    if size > MAX_PROMPT_LOGPROBS_BYTES:
        limit = (
            f"those of {num_tokens} tokens take {size} bytes, and a replica tells at most {MAX_PROMPT_LOGPROBS_BYTES} "
            "at once: ask for fewer, or of a shorter prompt"
        )
        raise InvalidRequestError("sampling_params.prompt_logprobs", params.prompt_logprobs, limit)


def echoed_text(
    tokenizer: Tokenizer, prompt: str | tuple[int, ...], kept: tuple[int, ...], params: SamplingParams
) -> str:
    """The text that `echo` puts before the output: the text prompt as given, or the decoded tokens that were kept.

    A character that the prompt ends in the middle of is left out: the output's text begins with it.
    """
    was_cut = params.truncate_prompt_tokens is not None
    text = prompt if isinstance(prompt, str) and not was_cut else tokenizer.decode(kept, params.skip_special_tokens)
    return text.removesuffix(IncrementalDetokenizer(tokenizer, params.skip_special_tokens, context=kept).finish())

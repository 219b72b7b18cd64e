"""Sampling parameters resolved for one model: token ids are checked, bad words encoded, defaults filled in.

What may not live here: logits processors (`worker/sampling/logits_processors.py`).
"""

from collections.abc import Sequence

from holdfast.router.request import derived_seed
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import InvalidRequestError, shortened
from holdfast.worker.sampling_params import SamplingParams


def check_vocabulary(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises `InvalidRequestError` for `field` if a token id is not in the vocabulary."""
    if (smallest := min(token_ids, default=0)) < 0:
        raise InvalidRequestError(field, smallest, f"token ids must not be negative, unlike {shortened(smallest)}")
    if (largest := max(token_ids, default=0)) >= vocab_size:
        limit = f"token ids must be below the vocabulary size, {vocab_size}, unlike {shortened(largest)}"
        raise InvalidRequestError(field, largest, limit)


def check_encoded(field: str, token_ids: Sequence[int], tokenizer: Tokenizer, vocab_size: int) -> None:
    """As `check_vocabulary`, of a text's tokens: a tokenizer may have added some that the model lacks."""
    if (largest := max(token_ids, default=0)) >= vocab_size:
        token = tokenizer.decode((largest,), skip_special_tokens=False)
        limit = f"its text has this token, of id {largest}, and the model's vocabulary ends at {vocab_size - 1}"
        raise InvalidRequestError(field, token, limit)


def check_logits_settings(params: SamplingParams, vocab_size: int) -> None:
    """Raises `InvalidRequestError`, naming the parameter, if one has a token id outside the vocabulary."""
    check_vocabulary("sampling_params.stop_token_ids", params.stop_token_ids, vocab_size)
    check_vocabulary("sampling_params.logprob_token_ids", params.logprob_token_ids, vocab_size)
    check_vocabulary("sampling_params.logit_bias", tuple(params.logit_bias), vocab_size)
    allowed = params.allowed_token_ids or ()
    if len(allowed) > vocab_size:
        limit = f"must have at most as many token ids as the vocabulary, {vocab_size}"
        raise InvalidRequestError("sampling_params.allowed_token_ids", len(allowed), limit)
    check_vocabulary("sampling_params.allowed_token_ids", allowed, vocab_size)


def resolved(params: SamplingParams, seed_key: str, *, vocab_size: int, max_model_len: int) -> SamplingParams:
    """The parameters with a seed, and with `max_tokens` and `top_k` limited to what the model has, so that they fit
    the engine's integers. Raises what `check_logits_settings` raises.
    """
    check_logits_settings(params, vocab_size)
    seed = derived_seed(seed_key) if params.seed is None else params.seed
    max_tokens = None if params.max_tokens is None else min(params.max_tokens, max_model_len)
    top_k = min(params.top_k, vocab_size)
    if (seed, max_tokens, top_k) == (params.seed, params.max_tokens, params.top_k):
        return params
    return params.with_changes(seed=seed, max_tokens=max_tokens, top_k=top_k)


def bad_word_token_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word at the start of a text and after a space, without repeats.

    Only these spellings are banned: a model may still compose a word of other tokens. Raises `InvalidRequestError` for
    a word that has no tokens.
    """
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not token_ids:
                raise InvalidRequestError(
                    "sampling_params.bad_words", word, "the model's tokenizer has no tokens for it"
                )
            spellings[token_ids] = None
    return tuple(spellings)

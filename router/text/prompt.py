"""Prompt preprocessing: truncation, the length check, and the text of `echo`.

Pure functions, for the router and for the offline engine.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from holdfast.router.request import EMPTY_PROMPT, GenerationRequest, derived_seed
from holdfast.router.text.detokenizer import IncrementalDetokenizer
from holdfast.router.text.tokenizer import EncodedPair, Tokenizer
from holdfast.worker.errors import InvalidRequestError, shortened
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.parameters import ALL_LOGPROBS
from holdfast.worker.pooling import PoolingTask
from holdfast.worker.sampling_params import SamplingParams

MAX_PROMPT_LOGPROBS_BYTES: Final = 16 * 2**20
"""Bytes for one prompt. A link's messages have at most 64 MiB, and several prompts may end in one step."""

_LOGPROB_BYTES: Final = 32
_CANDIDATE_BYTES: Final = 10
"""Most bytes of a token, and of each of its candidates, in a message: an id of five bytes, a number of four."""


def kept_tokens(
    token_ids: tuple[int, ...], params: SamplingParams, max_sequence_len: int, around: Sequence[int] = ()
) -> tuple[int, ...]:
    """The prompt's tokens that `truncate_prompt_tokens` keeps: its last ones, or with `truncate_right` its first ones,
    between those of `around` that it begins and ends with.

    With -1 it keeps the number of tokens that leave room for `max_tokens` within `max_sequence_len`, or for one token
    without a limit.
    """
    wanted = params.truncate_prompt_tokens
    assert wanted is not None, "no truncation"
    num_kept = wanted if wanted > 0 else max(1, max_sequence_len - (params.max_tokens or 1))
    front, back = _ends(token_ids, tuple(around)) if num_kept >= len(around) else (0, 0)
    end, num_inner = len(token_ids) - back, num_kept - front - back
    inner = token_ids[front:end]
    inner = inner[:num_inner] if params.truncate_right else inner[max(0, len(inner) - num_inner) :]
    return (*token_ids[:front], *inner, *token_ids[end:])


def kept_of_pair(pair: EncodedPair, params: SamplingParams, max_sequence_len: int) -> tuple[tuple[int, ...], int]:
    """The tokens of two texts that `truncate_prompt_tokens` keeps, and where those of the second begin. The longer text
    is cut until both have the same length, then both are, as Hugging Face's tokenizers cut them.

    Raises `InvalidRequestError` where there is no room for the tokens around them.
    """
    wanted = params.truncate_prompt_tokens
    num_kept = len(pair.token_ids) if wanted is None else max_sequence_len - 1 if wanted < 0 else wanted
    counts = [pair.texts.count(text) for text in (0, 1)]
    room = num_kept - (len(pair.texts) - sum(counts))
    if room < 0:
        limit = f"must be at least {num_kept - room}: so many tokens are around two texts"
        raise InvalidRequestError("sampling_params.truncate_prompt_tokens", wanted, limit)
    short, long = sorted(counts)
    if short + long > room:
        short, long = (short, room - short) if 2 * short <= room else (room // 2, room - room // 2)
    firsts, ends = [0, 0], [short, long] if counts[0] <= counts[1] else [long, short]
    if not params.truncate_right:
        firsts, ends = [all_ - kept for all_, kept in zip(counts, ends, strict=True)], counts
    seen = [0, 0]
    places = []
    for place, text in enumerate(pair.texts):
        if text is None:
            places.append(place)
            continue
        if firsts[text] <= seen[text] < ends[text]:
            places.append(place)
        seen[text] += 1
    second_start = sum(place < pair.second_start for place in places)
    return tuple([pair.token_ids[place] for place in places]), second_start


def _ends(token_ids: tuple[int, ...], around: tuple[int, ...]) -> tuple[int, int]:
    """Numbers of the tokens around a text that a prompt begins with, and ends with."""
    pairs = enumerate(zip(around, token_ids, strict=False))
    front = next((at for at, (one, other) in pairs if one != other), min(len(around), len(token_ids)))
    back = len(around) - front
    return (front, back) if token_ids[len(token_ids) - back :] == around[front:] else (0, 0)


def pooled(request: GenerationRequest, facts: ModelInfo) -> GenerationRequest:
    """A request for or of a pooled model, with the text that the model puts before each that it embeds.

    Raises `InvalidRequestError` if the model cannot return the requested output.
    """
    if facts.pooling is None:
        limit = "generates text: it gives neither vectors nor scores (docs/embeddings.md)"
        raise InvalidRequestError("model", facts.model, limit)
    if request.pooling is None:
        limit = f"{_GIVES[facts.pooling.task]}, and generates no text"
        raise InvalidRequestError("model", facts.model, limit)
    facts.pooling.check(request.pooling)
    if facts.pooling.prompt and isinstance(request.prompt, str) and request.chat is None:
        return replace(request, prompt=facts.pooling.prompt + request.prompt)
    return request


_GIVES: Final = {
    PoolingTask.EMBED: "gives vectors (/v1/embeddings)",
    PoolingTask.CLASSIFY: "gives scores (/v1/score, /v1/classify)",
}


def check_length(request: GenerationRequest, num_tokens: int, facts: ModelInfo) -> None:
    """Raises `InvalidRequestError` unless a request's prompt has tokens and leaves room for one more, in the model's
    context and in the KV cache.
    """
    max_sequence_len, max_model_len = facts.max_sequence_len, facts.max_model_len
    if 0 < num_tokens < max_sequence_len + (request.pooling is not None):
        return
    field, prompt = request.prompt_field, request.prompt if request.chat is None else request.chat.messages
    if num_tokens == 0:
        raise InvalidRequestError(field, prompt, "the prompt has no tokens" if prompt else EMPTY_PROMPT)
    more = "" if request.pooling is not None else ", and at least one more must fit"
    length = f"the prompt has {num_tokens} tokens{more}"
    if max_sequence_len == max_model_len:
        limit = f"this model's maximum context length is {max_model_len} tokens; {length}"
    else:
        limit = f"a replica's KV cache holds {max_sequence_len} tokens; {length}"
    raise InvalidRequestError(field, prompt, limit)


def with_counted_logprobs(params: SamplingParams, vocab_size: int, most: int) -> SamplingParams:
    """Parameters with the whole vocabulary as a number, where its log-probabilities are requested. Raises
    `InvalidRequestError` for more than `most`, the limit of a request.
    """
    names = [name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) == ALL_LOGPROBS]
    if names and vocab_size > most:
        limit = f"must be at most {most} (limits.max_logprobs): {ALL_LOGPROBS} asks for all {vocab_size} tokens"
        raise InvalidRequestError(f"sampling_params.{names[0]}", ALL_LOGPROBS, limit)
    return params.with_changes(**dict.fromkeys(names, vocab_size)) if names else params


def check_prompt_logprobs(params: SamplingParams, num_tokens: int) -> None:
    """Raises `InvalidRequestError` where the prompt's log-probabilities would not fit one message of a replica."""
    assert params.prompt_logprobs is not None, "they were asked for"
    size = num_tokens * (_LOGPROB_BYTES + _CANDIDATE_BYTES * params.prompt_logprobs)
    if size > MAX_PROMPT_LOGPROBS_BYTES:
        limit = (
            f"those of {num_tokens} tokens take {size} bytes, and a replica sends at most {MAX_PROMPT_LOGPROBS_BYTES} "
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


def check_vocabulary(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises `InvalidRequestError` for `field` if a token id is not in the vocabulary."""
    if (smallest := min(token_ids, default=0)) < 0:
        raise InvalidRequestError(field, smallest, f"token ids must not be negative, unlike {shortened(smallest)}")
    if (largest := max(token_ids, default=0)) >= vocab_size:
        limit = f"token ids must be below the vocabulary size, {vocab_size}, unlike {shortened(largest)}"
        raise InvalidRequestError(field, largest, limit)


def check_encoded(request: GenerationRequest, token_ids: Sequence[int], tokenizer: Tokenizer, vocab_size: int) -> None:
    """Like `check_vocabulary`, for the tokens of a request's text: its tokenizer may have some that the model lacks."""
    if (largest := max(token_ids, default=0)) >= vocab_size:
        token = tokenizer.decode((largest,), skip_special_tokens=False)
        limit = f"its text has this token, of id {largest}, and the model's vocabulary ends at {vocab_size - 1}"
        raise InvalidRequestError(request.prompt_field, token, limit)


def check_logits_settings(params: SamplingParams, vocab_size: int) -> None:
    """Raises `InvalidRequestError`, naming the parameter, if one has a token id outside the vocabulary."""
    allowed = params.allowed_token_ids or ()
    if len(allowed) > vocab_size:
        limit = f"must have at most one token id per entry of the vocabulary, {vocab_size}"
        raise InvalidRequestError("sampling_params.allowed_token_ids", len(allowed), limit)
    for name, token_ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logprob_token_ids", params.logprob_token_ids),
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", allowed),
    ):
        if token_ids:
            check_vocabulary(f"sampling_params.{name}", token_ids, vocab_size)


def resolved(params: SamplingParams, seed_key: str, facts: ModelInfo) -> SamplingParams:
    """The parameters with a seed, fitted to the model. Raises what `check_logits_settings` and `SamplingParams.fitted`
    raise.
    """
    check_logits_settings(params, facts.vocab_size)
    seed = derived_seed(seed_key) if params.seed is None else params.seed
    return params.fitted(seed, facts.max_model_len, facts.vocab_size)

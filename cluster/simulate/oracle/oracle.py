"""Oracle of the simulator: the expected completion of a request, computed from the request alone.

No batch, no cache, no chunks, no failure. It is written to be obviously right, and shares no code with the code under
test: tokens one after the other, each from the request and all tokens before it (`oracle.py`), and text decoded and
searched as a whole at each token.
"""

import re
from dataclasses import dataclass

from holdfast.cluster.simulate.oracle.pseudo_model import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    PseudoCodec,
    likelihoods,
    logprob,
    scores,
)
from holdfast.worker.request import EngineRequest, FinishReason, TokenLogprob


def right_token(request: EngineRequest, output: bytes) -> int:
    """The token that follows `output`."""
    params = request.sampling_params
    assert params.seed is not None
    tokens = bytes(request.prompt_token_ids) + output
    raw = scores(tokens, params.seed, len(output)) if params.temperature else likelihoods(tokens)
    if not _is_controlled(request):
        return raw.index(max(raw))
    candidates = _may_follow(request.grammar, output) if request.grammar else set(range(VOCAB_SIZE))
    allowed = set(range(VOCAB_SIZE) if params.allowed_token_ids is None else params.allowed_token_ids)
    candidates = candidates & allowed or candidates
    candidates = candidates - _unwanted(request, output) or candidates
    return max(sorted(candidates), key=lambda token_id: _worth(request, output, token_id, raw[token_id]))


def right_logprob(tokens: bytes, index: int, num_top: int) -> TokenLogprob:
    """Log-probability entry of token `index`, of a prompt or of an output."""
    values = likelihoods(tokens[:index])
    places = sorted(zip(values, range(0, -VOCAB_SIZE, -1), strict=True), reverse=True)
    token_id = tokens[index]
    return TokenLogprob(
        token_id=token_id,
        logprob=logprob(values[token_id]),
        rank=1 + sum(place > (values[token_id], -token_id) for place in places),
        top=tuple((-minus, logprob(value)) for value, minus in places[:num_top]),
    )


def _is_controlled(request: EngineRequest) -> bool:
    """Whether anything but the model decides the token."""
    params = request.sampling_params
    penalties = (params.repetition_penalty - 1, params.frequency_penalty, params.presence_penalty)
    others = (request.grammar, request.bad_word_token_ids, params.allowed_token_ids, params.logit_bias)
    return params.min_tokens > 0 or any(penalties) or any(others)


def _unwanted(request: EngineRequest, output: bytes) -> set[int]:
    """Tokens that are banned as long as any other is allowed."""
    params = request.sampling_params
    ends_early = {*params.stop_token_ids, EOS_TOKEN_ID} if len(output) < params.min_tokens else set()
    ignored = {EOS_TOKEN_ID} if params.ignore_eos and request.grammar else set()
    words = map(bytes, request.bad_word_token_ids)
    return ends_early | ignored | {word[-1] for word in words if output.endswith(word[:-1])}


def _worth(request: EngineRequest, output: bytes, token_id: int, score: int) -> float:
    """A token's score after bias and penalties."""
    params, count = request.sampling_params, output.count(token_id)
    worth = score / 16 - 8 + params.logit_bias.get(token_id, 0)
    if count or token_id in request.prompt_token_ids:
        worth *= 1 / params.repetition_penalty if worth > 0 else params.repetition_penalty
    return worth - count * params.frequency_penalty - (count > 0) * params.presence_penalty


def _may_follow(grammar: str, output: bytes) -> set[int]:
    """Tokens after `output`, in which each finished object is struck out, from the inside out."""
    ends, items, most = grammar.split(":")
    opener, closer = list(ends)
    text = PseudoCodec().decode(output, skip_special_tokens=False)
    before, finished = "", f"{opener}[{items}.]{{1,{most}}}{closer}"
    while text != before:
        before, text = text, re.sub(finished, ".", text)
    *_, entries = text.split(opener)
    is_inside, is_full = opener in text, len(entries) >= int(most)
    letters = "" if is_full else opener + (items if is_inside else "")
    letters += closer if is_inside and entries else ""
    return {*PseudoCodec().encode(letters, False), *([EOS_TOKEN_ID] if entries and not is_inside else [])}


_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedCompletion:
    """The one right output of a request."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token, if the request asks for them."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One for each prompt token but the first, if the request asks for them."""


def expected_completion(request: EngineRequest, max_model_len: int) -> ExpectedCompletion:
    """The output of `request` in a world without faults."""
    params, prompt = request.sampling_params, bytes(request.prompt_token_ids)
    output, text, finish_reason = _right_output(request, max_model_len - len(prompt))
    tokens = prompt + output
    later, drawn = range(1, len(prompt)), range(len(prompt), len(tokens))
    return ExpectedCompletion(
        token_ids=tuple(output),
        text=text,
        finish_reason=finish_reason,
        logprobs=_logprobs(tokens, drawn, params.logprobs),
        prompt_logprobs=_logprobs(tokens, later, params.prompt_logprobs),
    )


def _logprobs(tokens: bytes, positions: range, num_top: int | None) -> tuple[TokenLogprob, ...]:
    return () if num_top is None else tuple(right_logprob(tokens, index, num_top) for index in positions)


def _right_output(request: EngineRequest, num_room: int) -> tuple[bytes, str, FinishReason]:
    """Tokens, text and reason of the end."""
    params = request.sampling_params
    max_tokens = num_room if params.max_tokens is None else min(params.max_tokens, num_room)
    goes_on = params.ignore_eos and not request.grammar
    ends = set(params.stop_token_ids) | (set() if goes_on else {EOS_TOKEN_ID})
    output, before, text = b"", "", ""
    for index in range(max_tokens):
        output += bytes((right_token(request, output),))
        is_end = output[-1] in ends  # which is no text
        shown = output[:-1] if is_end and not params.include_stop_str_in_output else output
        text = PseudoCodec().decode(shown, skip_special_tokens=True)
        certain = text.rstrip(_REPLACEMENT)
        cut = _stop_cut(request, before, certain) if index >= params.min_tokens else None
        if cut is not None:
            return output, certain[:cut], FinishReason.STOP
        if is_end:
            return output, text, FinishReason.STOP
        before = certain
    return output, text, FinishReason.LENGTH


def _stop_cut(request: EngineRequest, before: str, text: str) -> int | None:
    """Position where the text is cut if a stop string is complete in the text after `before`."""
    params = request.sampling_params
    for end in range(len(before) + 1, len(text) + 1):
        found = [stop for stop in params.stop_strings if text[:end].endswith(stop)]
        if found:
            return end if params.include_stop_str_in_output else end - max(map(len, found))
    return None

"""What a request must give, worked out by itself: no batch, no cache, no pieces, no failure.

Written for being obviously right, and so that it shares no code with what it judges: tokens one after the other from
the pseudo-model, and text decoded and searched as a whole at each token.
"""

from dataclasses import dataclass

from cluster.simulate.pseudo_model import EOS_TOKEN_ID, PseudoCodec, next_token
from worker.request import EngineRequest, FinishReason

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The one right output of a request."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason


def right_completion(request: EngineRequest, max_model_len: int) -> Completion:
    """The output of `request` in a world without faults."""
    params = request.sampling_params
    num_prompt_tokens = len(request.prompt_token_ids)
    num_room = max_model_len - num_prompt_tokens
    max_tokens = num_room if params.max_tokens is None else min(params.max_tokens, num_room)
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS_TOKEN_ID})
    banned = sorted({*params.stop_token_ids, EOS_TOKEN_ID})
    tokens = bytearray(request.prompt_token_ids)
    seed = params.seed
    assert seed is not None
    before = ""
    for index in range(max_tokens):
        tokens.append(next_token(bytes(tokens), seed, index, banned if index < params.min_tokens else ()))
        output = tokens[num_prompt_tokens:]
        text = _text(output)
        certain = text.rstrip(_REPLACEMENT)
        cut = _stop_cut(request, before, certain) if index >= params.min_tokens else None
        if cut is not None:
            return Completion(token_ids=tuple(output), text=certain[:cut], finish_reason=FinishReason.STOP)
        if tokens[-1] in ends:
            return Completion(token_ids=tuple(output), text=text, finish_reason=FinishReason.STOP)
        before = certain
    return Completion(token_ids=tuple(output), text=text, finish_reason=FinishReason.LENGTH)


def _text(output: bytearray) -> str:
    return PseudoCodec().decode(output, skip_special_tokens=True)


def _stop_cut(request: EngineRequest, before: str, text: str) -> int | None:
    """Where the text is cut if a stop string is complete in what is new since `before`."""
    params = request.sampling_params
    for end in range(len(before) + 1, len(text) + 1):
        found = [stop for stop in params.stop_strings if text[:end].endswith(stop)]
        if found:
            return end if params.include_stop_str_in_output else end - max(map(len, found))
    return None

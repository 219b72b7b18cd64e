"""Oracle of the simulator: the expected completion of a request, computed from the request alone.

No batch, no cache, no chunks, no failure. It is written to be obviously right, and shares no code with what it judges:
tokens one after the other, each from the request and all tokens before it (`oracle_draws.py`), and text decoded and
searched as a whole at each token. What may not live here: the model (`pseudo_model.py`).
"""

from dataclasses import dataclass

from holdfast.cluster.simulate.oracle.oracle_draws import right_logprob, right_token
from holdfast.cluster.simulate.oracle.pseudo_model import EOS_TOKEN_ID, PseudoCodec
from holdfast.worker.request import EngineRequest, FinishReason, TokenLogprob

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
    """Where the text is cut if a stop string is complete in what is new since `before`."""
    params = request.sampling_params
    for end in range(len(before) + 1, len(text) + 1):
        found = [stop for stop in params.stop_strings if text[:end].endswith(stop)]
        if found:
            return end if params.include_stop_str_in_output else end - max(map(len, found))
    return None

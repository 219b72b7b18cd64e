"""Answers as plain data: what clients get, chunk by chunk or as a whole. Fields are named as in the public proto.

What may not live here: what goes on inside a router before there is an answer (`events.py`), wire formats.
"""

from dataclasses import dataclass

from holdfast.router.events import Usage
from holdfast.worker.request import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What is new of a completion. The chunks of one completion continue each other without gap or overlap."""

    request_id: str
    sequence_index: int = 0
    """Which of the request's completions it belongs to."""
    first_token_index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    """Set on the last chunk of a completion."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids` where the request asks for them; else empty."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """One for each prompt token, None for the first, where the request asks for them and the prompt has more than one;
    on the first chunk alone."""
    usage: Usage | None = None
    """Set on the very last chunk."""
    replayed_without_guarantee: bool = False
    """The request was carried on where equal tokens are not certain: nothing is missing, but another run may differ."""
    system_fingerprint: str = ""
    """Names all that the tokens are a function of, the request aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSequence:
    """One whole completion."""

    sequence_index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    """None only from servers that say a reason that is not known here."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids` where the request asks for them; else empty."""
    cumulative_logprob: float | None = None
    """The sum of the tokens' log-probabilities; set with `logprobs`, `best_of` and `beam_width`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """All that a request has come to. With `best_of` and `beam_width` the completions are in order, best first."""

    request_id: str
    model: str
    completions: tuple[GeneratedSequence, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """One for each prompt token, None for the first, as of `Chunk`."""
    replayed_without_guarantee: bool = False
    """As of `Chunk`."""
    system_fingerprint: str = ""
    """As of `Chunk`."""

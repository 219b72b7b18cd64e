"""Deltas in pieces: a delta with many log-probabilities is sent as several messages."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from holdfast.worker.request import TokenDelta, TokenLogprob

MAX_LOGPROBS: Final = 2**16
"""Log-probabilities of one message, alternatives included: about 1 MiB, so that no prompt is too long for a link, and
none keeps a loop busy for long.
"""


def delta_pieces(deltas: Sequence[TokenDelta]) -> Iterator[list[TokenDelta]]:
    """The same in pieces of at most `MAX_LOGPROBS`, in order; at least one piece. A delta that has more is split."""
    piece, room = list[TokenDelta](), MAX_LOGPROBS
    for delta in deltas:
        if delta.prompt_logprobs or delta.logprobs:
            for part in _split(delta):
                needed = _num_logprobs(part.prompt_logprobs) + _num_logprobs(part.logprobs)
                if needed > room and piece:
                    yield piece
                    piece, room = [], MAX_LOGPROBS
                piece.append(part)
                room -= needed
        else:
            piece.append(delta)
    yield piece


def _split(delta: TokenDelta) -> Iterator[TokenDelta]:
    """A delta that has too many log-probabilities as several: first parts of its prompt's, without tokens; then parts
    of its tokens with theirs, of which the last one says that it finishes.
    """
    prompt, logprobs, first = delta.prompt_logprobs, delta.logprobs, delta.first_token_index
    if _num_logprobs(prompt) + _num_logprobs(logprobs) <= MAX_LOGPROBS:
        yield delta
        return
    for part in _runs(prompt):
        yield TokenDelta(
            attempt=delta.attempt, first_token_index=0, token_ids=(), prompt_logprobs=prompt[part.start : part.stop]
        )
    rest = replace(delta, prompt_logprobs=())
    for part in _runs(logprobs):
        is_last = part.stop == len(logprobs)
        yield replace(
            rest,
            first_token_index=first + part.start,
            token_ids=delta.token_ids[part.start : part.stop],
            logprobs=logprobs[part.start : part.stop],
            finish_reason=delta.finish_reason if is_last else None,
            num_cached_tokens=0 if part.start else delta.num_cached_tokens,
            num_disk_tokens=0 if part.start else delta.num_disk_tokens,
            queued_s=0.0 if part.start else delta.queued_s,
        )
    if not logprobs:
        yield rest


def _runs(logprobs: Sequence[TokenLogprob]) -> Iterator[range]:
    """Their places, in runs of at most `MAX_LOGPROBS`."""
    if logprobs:
        size = max(1, MAX_LOGPROBS // (1 + max(len(item.top) for item in logprobs)))
        for start in range(0, len(logprobs), size):
            yield range(start, min(start + size, len(logprobs)))


def _num_logprobs(logprobs: Sequence[TokenLogprob]) -> int:
    return sum(1 + len(item.top) for item in logprobs)

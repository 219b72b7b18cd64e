"""Comparison of answers that should be equal: from which token on they differ, by how much, and a cause that fits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.cluster.verify.exchange import Choice, Token

NEAR_TIE: Final = 0.3
"""Nats between two tokens within which rounding may exchange them."""

_RETURNS: Final = 6
"""Characters at the end that are right again: then the middle was damaged, and the model did not go another way."""

_FOREIGN: Final = 16
"""Characters in a row that are taken for another request's, if the answer does not return to its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two answers that differ."""

    first_token: int | None
    gap: float | None
    damage: str = ""
    """`lost`, `repeated`, `mixed` or `changed` text; empty: the answer goes another way."""


def first_difference(expected: Choice, found: Choice, others: Iterable[str] = ()) -> Difference | None:
    """None: equal text, tokens and end. `others` are answers of requests that were served at the same time."""
    same_end = expected.finish_reason == found.finish_reason
    both = bool(expected.tokens and found.tokens)
    if expected.full == found.full and same_end:
        return None
    index = _first_token(expected.tokens, found.tokens) if both else None
    gap = None if index is None else gap_at(expected.tokens, found.tokens, index)
    return Difference(first_token=index, gap=gap, damage=damage(expected.full, found.full, others))


def _first_token(expected: Sequence[Token], found: Sequence[Token]) -> int:
    pairs = zip(expected, found, strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one.text != other.text), min(len(expected), len(found)))


def gap_at(expected: Sequence[Token], found: Sequence[Token], index: int) -> float | None:
    """Nats by which the first answer's token was likelier than the other's, by the first answer; None: not known."""
    if index >= len(expected) or index >= len(found):
        return None
    other = dict(expected[index].top).get(found[index].text)
    own = expected[index].logprob
    return None if own is None or other is None else own - other


def drift(expected: Sequence[Token], found: Sequence[Token]) -> float:
    """Largest difference of log-probabilities, in nats, over the tokens that both answers have in common."""
    most = 0.0
    for one, other in zip(expected, found, strict=False):
        if one.text != other.text:
            break
        if one.logprob is not None and other.logprob is not None:
            most = max(most, abs(one.logprob - other.logprob))
    return most


def damage(expected: str, found: str, others: Iterable[str] = ()) -> str:
    """Kind of damage that a text took on its way: `lost`, `repeated`, `mixed` (has text of `others`), `changed`.

    Empty: it is no damage of the expected text.
    """
    start = _common(expected, found)
    end = min(_common(expected[::-1], found[::-1]), len(expected) - start, len(found) - start)
    extra, missing = found[start : len(found) - end], expected[start : len(expected) - end]
    if not extra:
        return "lost" if missing else ""
    if not missing and _is_repeated(expected, start, extra):
        return "repeated"
    returns = not missing or end >= _RETURNS
    foreign = extra if returns else extra[:_FOREIGN]
    if len(foreign) >= (1 if returns else _FOREIGN) and any(foreign in other for other in others):
        return "mixed"
    return "changed" if returns else ""


def _is_repeated(text: str, at: int, extra: str) -> bool:
    """Whether `extra`, inserted at `at`, repeats the text before or after it, also rotated."""
    near = text[max(0, at - len(extra)) : at + len(extra)]
    return extra in near or any(extra[n:] + extra[:n] in near for n in range(len(extra)))


def _common(one: str, other: str) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


CAUSES: Final = {
    "repeated": "order of sums, or draws, that vary from run to run",
    "cached": "prefix cache: the answer from the cache differs from the computed one, and repeats itself",
    "batched": "batch size: the numbers depend on who shares the batch",
    "copies": "batch size: the numbers depend on who shares the batch",
    "together": "batch size: the numbers depend on who shares the batch",
    "paused": "state that changes with time or eviction",
    "streamed": "streams take another path than whole answers",
    "n": "several completions of one request take another path than one",
    "plain": "requests without log-probabilities take another path (drafts, a faster sampler)",
}
"""Cause that fits a difference in a situation, where the numbers are near or nothing is known of them."""


def likely_cause(situation: str, gap: float | None, *, only_repetitive: bool) -> str:
    """`gap`: the largest of all differences; `only_repetitive`: only prompts that repeat themselves differ."""
    if only_repetitive and situation not in ("batched", "copies", "together"):
        return "drafts: only prompts that repeat themselves differ"
    cause = CAUSES.get(situation, "")
    if gap is None:
        return cause
    near = "a near tie, as rounding (precision) exchanges" if gap <= NEAR_TIE else "no near tie: not rounding alone"
    return f"{cause}; {near}" if cause else near

"""Canary: whether a new version of a model is worse than the one that serves, from what routers have counted.

`verdict` is a pure function of counts. What may live here: limits, and reading known answers. What may not: making the
counts (`router/replicas/versions.py`), and acting on a verdict (`updates.py`).
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from holdfast.router.replicas.versions import VersionCounts
from holdfast.worker.errors import ConfigurationError

CHANCE: Final = 0.01
"""A canary is taken back for failures if one as good as the others would fail so often with a smaller chance."""

ALWAYS_SOME: Final = 0.005
"""The share of requests that may fail of any version: of zero failures nothing can be said with certainty."""

MIN_FAILED: Final = 2
"""One failure alone tells nothing."""

MAX_LOST: Final = 1
"""Replicas of a canary that may be lost: one may be chance."""

SLOWER: Final = 2.0
"""A canary is taken back if its first tokens take so many times as long on average."""

MIN_FIRST_TOKENS: Final = 20
"""Of each version, before their times are compared."""


class KnownAnswer(BaseModel):
    """A prompt and how the answer to it must begin."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str = Field(min_length=1)
    starts_with: str = Field(min_length=1)
    num_tokens: int = Field(16, ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What is known of a canary beside the versions that it is compared with."""

    canary: VersionCounts
    others: VersionCounts
    wrong_answers: Sequence[str] = ()
    """What it answered wrongly, each in a few words."""


def verdict(seen: Observed) -> str | None:
    """Why the canary must be taken back; None: nothing speaks against it."""
    canary, others = seen.canary, seen.others
    if seen.wrong_answers:
        return f"{len(seen.wrong_answers)} wrong known answers: {'; '.join(seen.wrong_answers[:3])}"
    if canary.num_lost > max(MAX_LOST, others.num_lost):
        return f"{canary.num_lost} of its replicas were lost, and {others.num_lost} of the others"
    if _is_worse(canary, others):
        return f"{_failures(canary)} failed, and {_failures(others)} of the others"
    if min(canary.num_first_tokens, others.num_first_tokens) >= MIN_FIRST_TOKENS:
        own_s, their_s = (one.first_token_s / one.num_first_tokens for one in (canary, others))
        if own_s > SLOWER * their_s:
            return f"its first tokens took {own_s:.3f} s on average, and {their_s:.3f} s those of the others"
    return None


def _is_worse(canary: VersionCounts, others: VersionCounts) -> bool:
    if canary.num_failed < MIN_FAILED:
        return False
    expected = max(ALWAYS_SOME, others.num_failed / max(1, _num_ended(others)))
    return chance_of_at_least(canary.num_failed, _num_ended(canary), min(1.0, expected)) < CHANCE


def chance_of_at_least(num_failed: int, number: int, share: float) -> float:
    """Of `number` independent requests, each of which fails with chance `share`: the chance that so many fail."""
    if not 0 < share < 1:
        return 1.0 if share >= 1 or num_failed == 0 else 0.0
    below = (
        math.exp(_log_ways(number, k) + k * math.log(share) + (number - k) * math.log1p(-share))
        for k in range(min(num_failed, number + 1))
    )
    return max(0.0, 1.0 - math.fsum(below))


def _log_ways(number: int, k: int) -> float:
    return math.lgamma(number + 1) - math.lgamma(k + 1) - math.lgamma(number - k + 1)


def _num_ended(counts: VersionCounts) -> int:
    return counts.num_finished + counts.num_failed


def _failures(counts: VersionCounts) -> str:
    return f"{counts.num_failed} of {_num_ended(counts)} requests"


def summed(model: str, version: str, counts: Iterable[VersionCounts]) -> VersionCounts:
    """Those of one version, from all routers."""
    total = VersionCounts(model=model, version=version)
    for one in counts:
        if (one.model, one.version) == (model, version):
            total = total.plus(one)
    return total


def since(now: VersionCounts, before: VersionCounts) -> VersionCounts:
    """What has been counted since; a router that was replaced begins anew, so nothing is below zero."""
    return replace(
        now,
        num_finished=max(0, now.num_finished - before.num_finished),
        num_failed=max(0, now.num_failed - before.num_failed),
        num_lost=max(0, now.num_lost - before.num_lost),
        num_first_tokens=max(0, now.num_first_tokens - before.num_first_tokens),
        first_token_s=max(0.0, now.first_token_s - before.first_token_s),
    )


def read_known_answers(path: Path) -> list[KnownAnswer]:
    """A JSON file: a list of objects with `prompt`, `starts_with` and, if wanted, `num_tokens`.

    Raises `ConfigurationError`.
    """
    try:
        found = TypeAdapter(list[KnownAnswer]).validate_python(json.loads(path.read_text()))
    except (OSError, ValueError, ValidationError) as error:
        told = " ".join(str(error).split())
        raise ConfigurationError(f"--known-answers {path}: {told}") from None
    if not found:
        raise ConfigurationError(f"--known-answers {path}: must have one at least")
    return found

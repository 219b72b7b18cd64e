"""Versions of a model that is being updated: which part of its new requests goes to a canary, and what came of each.

What may live here: the part as a function of a request's id, and counts by version. What may not: the choice of a
replica (`replica_registry.py`), and what follows from the counts (`cluster/serve/canary.py`).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

_RANGE: Final = 2**64


def position(request_id: str) -> float:
    """A place in [0, 1) for a request: those below a canary's share go to it. A retry has the same."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest) / _RANGE


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCounts:
    """What one router has seen of one version of a model since it started."""

    model: str
    version: str
    num_finished: int = 0
    num_failed: int = 0
    """Attempts that replicas of this version gave up or lost, and requests that failed or expired there."""
    num_lost: int = 0
    """Replicas that were lost although nobody had ended them; one that answers its self-check wrongly ends so."""
    num_first_tokens: int = 0
    first_token_s: float = 0.0
    """Time from sending to the first token, of all together."""

    def plus(self, other: "VersionCounts") -> "VersionCounts":
        return VersionCounts(
            model=self.model,
            version=self.version,
            num_finished=self.num_finished + other.num_finished,
            num_failed=self.num_failed + other.num_failed,
            num_lost=self.num_lost + other.num_lost,
            num_first_tokens=self.num_first_tokens + other.num_first_tokens,
            first_token_s=self.first_token_s + other.first_token_s,
        )


class VersionLedger:
    """Counts of every version that has served here."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], VersionCounts] = {}

    @property
    def counts(self) -> Mapping[tuple[str, str], VersionCounts]:
        """By model and version."""
        return self._counts

    def note_first_token(self, model: str, version: str, seconds: float) -> None:
        before = self._of(model, version)
        first_token_s, number = before.first_token_s + seconds, before.num_first_tokens + 1
        self._counts[model, version] = replace(before, first_token_s=first_token_s, num_first_tokens=number)

    def note_finished(self, model: str, version: str) -> None:
        before = self._of(model, version)
        self._counts[model, version] = replace(before, num_finished=before.num_finished + 1)

    def note_failed(self, model: str, version: str) -> None:
        before = self._of(model, version)
        self._counts[model, version] = replace(before, num_failed=before.num_failed + 1)

    def note_lost(self, model: str, version: str) -> None:
        before = self._of(model, version)
        self._counts[model, version] = replace(before, num_lost=before.num_lost + 1)

    def _of(self, model: str, version: str) -> VersionCounts:
        return self._counts.get((model, version)) or VersionCounts(model=model, version=version)

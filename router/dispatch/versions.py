"""Versions of a model that is being updated: share of new requests for the canary, and outcomes by version."""

import hashlib
from dataclasses import dataclass
from typing import Final

_RANGE: Final = 2**64  # values of 8 bytes of a digest


def position(request_id: str) -> float:
    """A place in [0, 1) for a request: those below a canary's share go to it. A retry has the same."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest) / _RANGE


@dataclass(slots=True, kw_only=True)
class VersionCounts:
    """Counts of one version of a model in one router since its start. The router counts on: others get copies."""

    model: str
    version: str
    num_finished: int = 0
    num_failed: int = 0
    """Attempts that replicas of this version gave up or lost, and requests that failed or expired there."""
    num_lost: int = 0
    """Replicas that were lost without an order to end, such as after a wrong self-check."""
    num_first_tokens: int = 0
    first_token_s: float = 0.0
    """Time from sending to the first token, of all together."""

    def plus(self, other: "VersionCounts") -> "VersionCounts":
        """Sum of both, of the same version."""
        return VersionCounts(
            model=self.model,
            version=self.version,
            num_finished=self.num_finished + other.num_finished,
            num_failed=self.num_failed + other.num_failed,
            num_lost=self.num_lost + other.num_lost,
            num_first_tokens=self.num_first_tokens + other.num_first_tokens,
            first_token_s=self.first_token_s + other.first_token_s,
        )

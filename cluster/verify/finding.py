"""Finding of an audit: its name, how bad it is, how often it was seen, and the request that shows it. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Weight of a finding, the heaviest first."""

    FAULT = "fault"
    """The answer is wrong by the API's own contract."""
    DIFFERENCE = "difference"
    """The same request got another answer, or a promise that some servers make is not kept."""
    NOTE = "note"
    """Nothing is wrong: a feature that is not offered, or a measured figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Evidence of a finding: request, expected answer and found answer."""

    path: str
    request: Mapping[str, Any]
    expected: str
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding, over all requests that show it."""

    name: str
    kind: Kind
    about: str
    """One sentence."""
    cause: str = ""
    """Kind of the most likely cause; empty: none is more likely than others."""
    num_seen: int = 1
    num_tried: int = 1
    first_token: int | None = None
    """Smallest index of an output token from which on an answer differed; None: not known by token."""
    gap: float | None = None
    """Log-probability, in nats, by which the first answer's token was likelier than the other one, at most; None: not
    reported by the server.
    """
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One check that ran, or why it did not."""

    name: str
    findings: tuple[Finding, ...] = ()
    skipped: str = ""
    num_requests: int = 0
    num_compared: int = 0
    seconds: float = 0.0

    @property
    def worst(self) -> Kind | None:
        return min((one.kind for one in self.findings), key=list(Kind).index, default=None)

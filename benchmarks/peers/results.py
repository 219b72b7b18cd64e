"""Results: runs of a server on a case, and the medians, spreads and ratios that are made of them.

Plain data and arithmetic, and its form in JSON.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One or more bursts of a case, one after another, as one measurement."""

    seconds: float
    num_tokens: int
    others: float
    """Share of the machine that other processes took meanwhile."""
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A peer's run and ours right after it, with the same prompts."""

    theirs: Run
    ours: Run

    @property
    def others(self) -> float:
        return max(self.theirs.others, self.ours.others)

    @property
    def ratio(self) -> float:
        """How many times the peer's rate ours is."""
        return self.ours.tokens_per_s / self.theirs.tokens_per_s


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of some figures."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> "Spread":
        return cls(statistics.median(figures), min(figures), max(figures))


@dataclass(slots=True, kw_only=True)
class Comparison:
    """A peer on one case."""

    pairs: list[Pair] = field(default_factory=list)
    dropped: list[Pair] = field(default_factory=list)
    """Rounds that were repeated because other processes were busy."""
    is_first_run: bool = False
    """It was too slow for a run after the warm-up: its only figure is that of the warm-up."""
    is_noisy: bool = False
    """A round was kept although others were busy: the repeats were used up."""
    error: str = ""
    """Why there is nothing, or nothing more."""

    @property
    def rate(self) -> Spread | None:
        return Spread.of([pair.theirs.tokens_per_s for pair in self.pairs]) if self.pairs else None

    @property
    def ratio(self) -> Spread | None:
        return Spread.of([pair.ratio for pair in self.pairs]) if self.pairs else None


@dataclass(slots=True, kw_only=True)
class CaseResult:
    """One case, every peer beside ours."""

    comparisons: dict[str, Comparison]
    num_bursts: int
    """Bursts of a run: more than one where a burst is too short to be timed."""
    ours_alone: list[Run] = field(default_factory=list)
    """Runs without a peer, where none was asked for."""
    dropped_alone: list[Run] = field(default_factory=list)
    our_parts: dict[str, float] = field(default_factory=dict)
    """The split of Holdfast's, from a burst of its own that was not timed."""

    @property
    def our_runs(self) -> list[Run]:
        return self.ours_alone + [pair.ours for one in self.comparisons.values() for pair in one.pairs]

    @property
    def our_rate(self) -> Spread | None:
        runs = self.our_runs
        return Spread.of([run.tokens_per_s for run in runs]) if runs else None

    @property
    def num_dropped(self) -> int:
        return len(self.dropped_alone) + sum(len(one.dropped) for one in self.comparisons.values())

    @property
    def best_peer(self) -> str | None:
        """Of others: our own server may be beside them."""
        others = {name: one for name, one in self.comparisons.items() if not name.startswith("holdfast")}
        rates = {name: one.rate.median for name, one in others.items() if one.rate is not None}
        return max(rates, key=rates.__getitem__) if rates else None


@dataclass(slots=True, kw_only=True)
class ServerFacts:
    """What is known of a server beside its rates."""

    versions: dict[str, str] = field(default_factory=dict)
    start_s: float = 0.0
    """From the start of its process to its first token."""
    start_others: float = 0.0
    idle_share: float = 0.0
    """Share of the cores it takes with nothing to do. It is paused while others are measured."""
    peak_memory_mib: int = 0
    check: dict[str, float] = field(default_factory=dict)
    """How its greedy ids compare with the reference's: `first_choice`, `largest_gap`."""
    error: str = ""
    """Why it was left out."""


@dataclass(slots=True, kw_only=True)
class ModelResult:
    """Everything about one model. Ours is a server under its own name."""

    servers: dict[str, ServerFacts] = field(default_factory=dict)
    cases: dict[str, CaseResult] = field(default_factory=dict)
    weight_bytes: int = 0
    """What one decode step of one request reads of the weights."""

    def as_json(self) -> dict[str, Any]:
        cases = {name: _case_json(case) for name, case in self.cases.items()}
        servers = {name: asdict(facts) for name, facts in self.servers.items()}
        return {"weight_bytes": self.weight_bytes, "servers": servers, "cases": cases}


def parts_of(runs: Sequence[Run]) -> dict[str, float]:
    """The median of each part over the runs that tell it."""
    names = {name for run in runs for name in run.parts}
    return {name: statistics.median(run.parts[name] for run in runs if name in run.parts) for name in sorted(names)}


def _case_json(case: CaseResult) -> dict[str, Any]:
    peers = {
        name: {
            "rate": _spread_json(one.rate),
            "ratio": _spread_json(one.ratio),
            "parts": parts_of([pair.theirs for pair in one.pairs]),
            "num_dropped": len(one.dropped),
            **asdict(one),
        }
        for name, one in case.comparisons.items()
    }
    return {
        "num_bursts": case.num_bursts,
        "ours": {
            "rate": _spread_json(case.our_rate),
            "parts": case.our_parts,
            "runs": [asdict(r) for r in case.our_runs],
        },
        "best_peer": case.best_peer,
        "num_dropped": case.num_dropped,
        "peers": peers,
    }


def _spread_json(spread: Spread | None) -> dict[str, float] | None:
    return asdict(spread) if spread is not None else None

"""Schedule of a case: warm-ups, then rounds in which every peer's run is followed by one of Holdfast's.

A run and the one after it share the machine's state of the moment, so that their ratio holds on a machine whose speed
drifts. Rounds in which other processes were busy are repeated, a bounded number of times.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from benchmarks.peers.cases import Case, prompts
from benchmarks.peers.results import CaseResult, Comparison, Pair, Run
from benchmarks.peers.server import Answer, ServerError

Say = Callable[[str], None]
Measured = TypeVar("Measured", Run, Pair)
_MAX_BURSTS: Final = 10


class Answering(Protocol):
    """What the schedule needs of a server."""

    name: str

    def ask(
        self,
        case: str,
        prompts: list[list[int]],
        max_tokens: int,
        *,
        split: bool = False,
        sampling: Mapping[str, float | str] = ...,
    ) -> Answer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long is measured, and how quiet it must be."""

    rounds: int = 3
    patience_s: float = 25.0
    """A peer's time for a case, its warm-up among it: a slow one gets fewer rounds."""
    least_s: float = 0.5
    """A run has as many bursts as it takes the fastest server to last so long."""
    noise: float = 0.06
    """Share of the machine that others may take during a round that counts."""
    repeats: int = 4
    """Rounds of one peer in one case that may be repeated."""


class Alternation:
    """One model's servers, measured against ours."""

    def __init__(
        self,
        ours: Answering,
        peers: Sequence[Answering],
        vocab_size: int,
        limits: Limits,
        *,
        settle: Callable[[], object],
        say: Say,
    ) -> None:
        """`settle` waits until the machine is quiet, or gives up."""
        self._ours = ours
        self._peers = peers
        self._vocab_size = vocab_size
        self._limits = limits
        self._settle = settle
        self._say = say

    def measure(self, case: Case) -> CaseResult:
        """Raises `ServerError` if ours fails; a peer that does has its error in the result."""
        warm_ups: dict[str, Run] = {self._ours.name: self._run(self._ours, case, "warm", 1)}
        result = CaseResult(comparisons={peer.name: Comparison() for peer in self._peers}, num_bursts=1)
        for peer in self._peers:
            with _noting(result.comparisons[peer.name], peer.name):
                warm_ups[peer.name] = self._run(peer, case, "warm", 1)
        fastest_s = min(run.seconds for run in warm_ups.values())
        result.num_bursts = min(_MAX_BURSTS, max(1, math.ceil(self._limits.least_s / fastest_s)))
        self._rounds(case, result, warm_ups)
        result.our_parts = self._burst(self._ours, case, "split", split=True).parts
        return result

    def _rounds(self, case: Case, result: CaseResult, warm_ups: dict[str, Run]) -> None:
        for number in range(self._limits.rounds):
            for peer in self._peers:
                comparison = result.comparisons[peer.name]
                if comparison.error:
                    continue
                with _noting(comparison, peer.name):
                    self._round(case, peer, number, warm_ups[peer.name], result)
            if not self._peers:
                result.ours_alone.append(self._alone(case, number, result))

    def _round(self, case: Case, peer: Answering, number: int, warm_up: Run, result: CaseResult) -> None:
        """One counted round of a peer, if it has patience for it."""
        comparison = result.comparisons[peer.name]
        num_rounds = self._affordable(warm_up.seconds, result.num_bursts)
        if num_rounds == 0 and number == 0:
            comparison.is_first_run = True
            pair = Pair(theirs=warm_up, ours=self._run(self._ours, case, f"{peer.name}/first", 1))
            self._keep(case, peer, pair, comparison)
        elif number < num_rounds:
            self._keep(case, peer, self._quiet_pair(case, peer, number, result), comparison)

    def _affordable(self, warm_up_s: float, num_bursts: int) -> int:
        """Rounds for which there is patience; 0 for a peer whose warm-up has used it up."""
        left_s = self._limits.patience_s - warm_up_s
        return max(0, min(self._limits.rounds, int(left_s / (warm_up_s * num_bursts))))

    def _quiet_pair(self, case: Case, peer: Answering, number: int, result: CaseResult) -> Pair:
        """A peer's run and ours. Every attempt has prompts of its own, which no cache has seen."""

        def attempt(repeat: int) -> Pair:
            name = f"{peer.name}/{number}/{repeat}"
            theirs = self._run(peer, case, name, result.num_bursts)
            return Pair(theirs=theirs, ours=self._run(self._ours, case, name, result.num_bursts))

        return self._quiet(attempt, result.comparisons[peer.name].dropped, f"{case.name}: {peer.name}")

    def _alone(self, case: Case, number: int, result: CaseResult) -> Run:
        def attempt(repeat: int) -> Run:
            return self._run(self._ours, case, f"alone/{number}/{repeat}", result.num_bursts)

        return self._quiet(attempt, result.dropped_alone, f"{case.name}: {self._ours.name}")

    def _quiet(self, attempt: Callable[[int], Measured], dropped: list[Measured], title: str) -> Measured:
        """The first attempt that nobody disturbed, or the first after the repeats were used up."""
        while True:
            measured = attempt(len(dropped))
            if measured.others <= self._limits.noise or len(dropped) >= self._limits.repeats:
                return measured
            dropped.append(measured)
            self._say(f"  {title}: a round dropped, others took {measured.others:.0%} of the machine")
            self._settle()

    def _keep(self, case: Case, peer: Answering, pair: Pair, comparison: Comparison) -> None:
        comparison.pairs.append(pair)
        comparison.is_noisy |= pair.others > self._limits.noise
        theirs, ours = pair.theirs.tokens_per_s, pair.ours.tokens_per_s
        self._say(f"  {case.name}: {peer.name} {theirs:.4g} tok/s, {self._ours.name} {ours:.4g} ({pair.ratio:.2f} x)")

    def _run(self, server: Answering, case: Case, name: str, num_bursts: int) -> Run:
        answers = [self._burst(server, case, f"{name}/{burst}") for burst in range(num_bursts)]
        seconds = sum(answer.seconds for answer in answers)
        names = set.intersection(*(set(answer.parts) for answer in answers))
        return Run(
            seconds=seconds,
            num_tokens=num_bursts * case.num_output_tokens,
            others=sum(answer.usage.others * answer.seconds for answer in answers) / seconds,
            parts={part: sum(answer.parts[part] for answer in answers) for part in sorted(names)},
        )

    def _burst(self, server: Answering, case: Case, name: str, *, split: bool = False) -> Answer:
        asked = prompts(case, self._vocab_size, name)
        return server.ask(case.name, asked, case.max_tokens, split=split, sampling=case.sampling)


@contextmanager
def _noting(comparison: Comparison, peer: str) -> Iterator[None]:
    """A block in which the peer's failure becomes the comparison's. Ours ends the benchmark."""
    try:
        yield
    except ServerError as error:
        if error.server != peer:
            raise
        comparison.error = str(error)

"""State of a replica that is up, and of a model: load, attempts, versions.

What may live here: what is known, and what follows from it about one replica or model. What may not: the table of all
of them, and the choice of a replica (`replica_registry.py`).
"""

import math
from dataclasses import replace
from typing import Final

from holdfast.router.config import PolicyName
from holdfast.router.replicas.circuit_breaker import CircuitBreaker
from holdfast.router.replicas.load_table import LoadTable
from holdfast.router.replicas.pace import Pace
from holdfast.router.replicas.policy import CLOSED, Slot, load_score
from holdfast.router.replicas.prefix_index import PrefixIndex
from holdfast.worker.model_info import ModelInfo, ReplicaFacts
from holdfast.worker.request import EngineLoad
from holdfast.worker.stats import EngineStats
from holdfast.worker.step_update import StepUpdate

TTFT_SHARE: Final = 0.3
"""Of the longest time to a first token, the share that a request may be expected to wait in its replica."""


class ReplicaState:
    """One replica that is up. Whatever changes its load or whether it is open is told to its model's load table."""

    def __init__(
        self,
        facts: ReplicaFacts,
        load: EngineLoad,
        breaker: CircuitBreaker,
        table: LoadTable,
        max_waiting: int,
        max_ttft_s: float | None = None,
    ) -> None:
        self.facts = facts
        self.version, self.fingerprint = facts.version, facts.fingerprint
        self.load = load
        self.breaker = breaker
        self.stats: EngineStats | None = None
        """As last reported; None before the first report."""
        self.slot = table.add(facts.replica_id)
        """Its place in the load table."""
        self.cached = PrefixIndex(facts.block_size, table.holders, self.slot)
        """Its prefix cache; empty unless this router follows cache events."""
        self.attempts: set[int] = set()
        """Attempts of this router that run or wait there."""
        self._is_up = True
        self._is_retiring = False
        self._num_sent = 0
        self._num_sent_tokens = 0
        self._table = table
        self._max_waiting = max_waiting
        self._max_wait_s = math.inf if max_ttft_s is None else TTFT_SHARE * max_ttft_s
        self._without_output: set[int] = set()
        """Of the attempts, those that have brought nothing yet."""
        self._starts = Pace()
        """Of first outputs here."""
        breaker.on_change = self._refresh
        self._refresh()

    def leave(self) -> None:
        """The replica was lost. What is still noted of it changes nothing: its slot may be another's."""
        self._is_up = False
        self.breaker.on_change = None
        self.cached.close()
        self._table.remove(self.slot)

    @property
    def score(self) -> float:
        """Its load, as `policy.py` compares it."""
        return load_score(self.load, self._num_sent, self._num_sent_tokens, len(self.attempts))

    @property
    def is_retiring(self) -> bool:
        return self._is_retiring

    @is_retiring.setter
    def is_retiring(self, value: bool) -> None:
        self._is_retiring = value
        self._refresh()

    def note_sent(self, attempt: int, num_tokens: int) -> None:
        """An attempt with `num_tokens` to compute was sent there; the next report is expected to include it."""
        self.attempts.add(attempt)
        self._without_output.add(attempt)
        self._num_sent += 1
        self._num_sent_tokens += num_tokens
        self._refresh()

    def note_end(self, attempt: int) -> None:
        """An attempt is no longer this router's."""
        self.attempts.remove(attempt)
        self._without_output.discard(attempt)
        if not self._without_output:
            self._starts.note_idle()
        self._refresh()

    def note_first_output(self, attempt: int, now: float) -> None:
        """An attempt has brought its first output."""
        self._without_output.discard(attempt)
        self._starts.note(now, more_due=bool(self._without_output))
        self._refresh()

    def note_report(self, load: EngineLoad) -> None:
        self.load = load
        self._num_sent = 0
        self._num_sent_tokens = 0
        self._refresh()

    def note_memory(self, update: StepUpdate) -> None:
        """Takes the cache events and the stats of an update, if it has any."""
        if update.cache.stored or update.cache.evicted:
            self.cached.apply(update.cache.stored, update.cache.evicted)
        if update.stats is not None:
            self.stats = update.stats
            if update.stats.prefill_tokens_per_s > 0:
                self._table.set_speed(self.slot, update.stats.prefill_tokens_per_s)

    def takes_more(self, *, is_trial: bool = False) -> bool:
        """Whether it may get a new attempt: a request sent now would find fewer than the configured number ahead of it,
        and not wait too long. A trial proves nothing on a replica with suspects of other routers. A replica without
        attempts of this router always has room: its load may be stale, and only steps refresh it.
        """
        is_fit = not is_trial or self.load.num_foreign_suspects == 0
        if not is_fit or self._is_retiring or self.breaker.rests_until is not None:
            return False
        if not self.attempts:
            return True
        if self.load.num_waiting + self._num_sent >= self._max_waiting:
            return False
        return self._max_wait_s == math.inf or self._starts.wait_s(len(self._without_output)) <= self._max_wait_s

    def _refresh(self) -> None:
        if self._is_up:
            self._table.set_score(self.slot, self.score if self.takes_more() else CLOSED)


class ModelState:
    """One model that has been served here at least once."""

    def __init__(self, facts: ModelInfo, policy: PolicyName) -> None:
        self.facts = facts
        self.policy = policy
        self.table = LoadTable(has_ring=policy == "session_affinity")
        self.replicas: list[ReplicaState] = []
        self.by_slot: dict[Slot, ReplicaState] = {}
        self.down_since: float | None = None
        """When the last replica was lost; None while one is up."""
        self.versions: frozenset[str] = frozenset()
        """Of the replicas that are up."""
        self.missing: dict[str, float] = {}
        """Versions without a replica, and since when they have been asked for or were lost."""

    def refresh(self, now: float) -> None:
        """A replica has come, or was lost."""
        before, self.versions = self.versions, frozenset(replica.version for replica in self.replicas)
        for version in before - self.versions:
            self.missing[version] = now
        for version in self.versions:
            self.missing.pop(version, None)
        self.down_since = None if self.replicas else now
        self.refresh_facts()

    def others_than(self, version: str) -> list[Slot]:
        """The slots of replicas of other versions."""
        return [replica.slot for replica in self.replicas if replica.version != version]

    def refresh_facts(self) -> None:
        """Sets the facts to what every replica that is up supports; with none up, keeps the last ones."""
        all_facts = [replica.facts for replica in self.replicas]
        if all_facts:
            smallest = min(all_facts, key=lambda facts: facts.num_blocks * facts.block_size)
            self.facts = replace(
                smallest,
                max_model_len=min(facts.max_model_len for facts in all_facts),
                row_invariant=all(facts.row_invariant for facts in all_facts),
            )

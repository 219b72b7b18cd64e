"""State of a replica that is up, and of a model: load, attempts, versions."""

import math
from dataclasses import replace
from enum import Enum
from typing import Final

from holdfast.router.config import PolicyName
from holdfast.router.dispatch.circuit_breaker import CircuitBreaker
from holdfast.router.dispatch.policy import (
    CLOSED,
    TOKENS_PER_SEQUENCE,
    UNKNOWN_TOKEN_S,
    HashRing,
    RandomIndex,
    RoutingSnapshot,
    Slot,
)
from holdfast.router.dispatch.prefix_index import NO_MATCH, PrefixHolders, PrefixIndex, PrefixMatch
from holdfast.worker.model_info import ModelInfo, ReplicaFacts
from holdfast.worker.request import EngineLoad
from holdfast.worker.step_update import EngineStats, StepUpdate


class LoadTable:
    """Loads and speeds by slot. Every change takes the same time, however many replicas there are."""

    def __init__(self, *, has_ring: bool) -> None:
        self.scores: list[float] = []
        """`CLOSED` for a replica that may get no request now, and for an empty slot."""
        self.holders = PrefixHolders()
        self.ring = HashRing()
        self.last: Slot = -1
        self.num_open = 0
        self.total_score = 0.0
        """Exact: loads are multiples of 1 / `TOKENS_PER_SEQUENCE`."""
        self._token_s: list[float | None] = []
        self._has_ring = has_ring
        self._free: list[Slot] = []
        self._typical_token_s = UNKNOWN_TOKEN_S
        """Seconds per token as last measured by any replica."""

    def add(self, replica_id: str) -> Slot:
        """A slot for a new replica, which is closed until its load is set."""
        if not self._free:
            self._free.append(len(self.scores))
            self.scores.append(CLOSED)
            self._token_s.append(None)
        slot = self._free.pop()
        if self._has_ring:
            self.ring.add(replica_id, slot)
        return slot

    def remove(self, slot: Slot) -> None:
        """The replica was lost. Another may get its slot."""
        self.set_score(slot, CLOSED)
        self._token_s[slot] = None
        self._free.append(slot)
        if self._has_ring:
            self.ring.remove(slot)

    def set_score(self, slot: Slot, score: float) -> None:
        before = self.scores[slot]
        if before != CLOSED:
            self.num_open -= 1
            self.total_score -= before
        if score != CLOSED:
            self.num_open += 1
            self.total_score += score
        self.scores[slot] = score

    def set_speed(self, slot: Slot, tokens_per_s: float) -> None:
        """Prompt tokens a second, as a replica has measured them."""
        self._token_s[slot] = self._typical_token_s = 1 / tokens_per_s

    def snapshot(
        self, random_index: RandomIndex, num_prompt_tokens: int, prefix: PrefixMatch = NO_MATCH, session_id: str = ""
    ) -> RoutingSnapshot:
        """Input of a policy for one request. It is valid until the next change."""
        return RoutingSnapshot(
            scores=self.scores,
            num_open=self.num_open,
            total_score=self.total_score,
            token_s=self._token_s,
            typical_token_s=self._typical_token_s,
            ring=self.ring,
            last=self.last,
            random_index=random_index,
            num_prompt_tokens=num_prompt_tokens,
            prefix=prefix,
            session_id=session_id,
        )

    def check_integrity(self) -> None:
        """Asserts that the sums are those of the loads."""
        open_scores = [score for score in self.scores if score != CLOSED]
        assert self.num_open == len(open_scores)
        assert self.total_score == sum(open_scores)


_KEPT: Final = 0.95
"""Weight of a pause against the one after it: about the last 20 count."""


class Pace:
    """Pace of one kind of events."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._sum_s = 0.0
        self._weight = 0.0

    def note(self, now: float, *, more_due: bool) -> None:
        """An event has happened, and another one is due or not."""
        if self._last is not None:
            self._sum_s = _KEPT * self._sum_s + max(now - self._last, 0.0)
            self._weight = _KEPT * self._weight + 1.0
        self._last = now if more_due else None

    def note_idle(self) -> None:
        """Notes that nothing is due any more, without an event: what was due has been given up."""
        self._last = None

    @property
    def mean_s(self) -> float | None:
        """None as long as no two events followed each other."""
        return self._sum_s / self._weight if self._weight else None

    def wait_s(self, num_ahead: int) -> float:
        """Estimated wait behind so many; 0 while nothing is known."""
        return num_ahead * (self.mean_s or 0.0)


TTFT_SHARE: Final = 0.3
"""Share of the longest time to a first token that a request may be expected to wait in its replica."""


class ReplicaState:
    """One replica that is up. Each change of its load, and of whether it takes requests, is written to its model's load
    table.
    """

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
        self.role = Role.BOTH
        self.load = load
        self.breaker = breaker
        self.stats: EngineStats | None = None
        """Statistics as last reported; None before the first report."""
        self.slot = table.add(facts.replica_id)
        """Slot in the load table."""
        has_states = facts.num_state_slots > 0
        self.cached = PrefixIndex(facts.block_size, table.holders, self.slot, has_states=has_states)
        """The replica's prefix cache; empty unless this router follows cache events."""
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
        """Attempts without output."""
        self._starts = Pace()
        """Pace of first outputs on this replica."""
        breaker.on_change = self._refresh
        self._refresh()

    def close(self) -> None:
        """The replica was lost. What is still noted of it changes nothing: its slot may be another's."""
        self._is_up = False
        self.breaker.on_change = None
        self.cached.close()
        self._table.remove(self.slot)

    @property
    def score(self) -> float:
        """Load as `policy.py` compares it: sequences, plus prompt tokens to compute in units of `TOKENS_PER_SEQUENCE`;
        both as last reported, and what was sent there since.

        All attempts of this router there are a lower bound: a report may have been sent before a submission arrived.
        """
        load = self.load
        num_sequences = max(load.num_running + load.num_waiting + self._num_sent, len(self.attempts))
        return num_sequences + (load.num_waiting_tokens + self._num_sent_tokens) / TOKENS_PER_SEQUENCE

    def sends_blocks_to(self, other: "ReplicaState") -> bool:
        """Whether another replica can take its blocks."""
        return bool(self.facts.transfers_blocks and self.facts.address) and self.version == other.version

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
        if self.breaker.num_failures or self.breaker.rests_until is not None:
            self.breaker.note_success()
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


class Role(Enum):
    """Part of a replica in the requests of its model."""

    BOTH = "both"
    PREFILL = "prefill"
    """Computes long prompts, and hands their requests on."""
    DECODE = "decode"
    """Gets no long prompts while others take them."""


class ModelState:
    """One model that has been served here at least once."""

    def __init__(self, facts: ModelInfo, policy: PolicyName, num_prefill: int = 0, num_decode: int = 0) -> None:
        """`num_prefill` of its replicas compute long prompts alone, and `num_decode` get none."""
        self.facts = facts
        self.policy = policy
        self._num_by_role = num_prefill, num_decode
        self.has_roles = False
        """Whether some of its replicas have a role now, and can hand requests on."""
        self.table = LoadTable(has_ring=policy == "session_affinity")
        self.replicas: list[ReplicaState] = []
        self.by_slot: dict[Slot, ReplicaState] = {}
        self.down_since: float | None = None
        """When the last replica was lost; None while one is up."""
        self.versions: frozenset[str] = frozenset()
        """Versions of the replicas that are up."""
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
        self._assign_roles()
        self.refresh_facts()

    def _assign_roles(self) -> None:
        """Assigns roles in the order of ids, so that routers that know the same replicas agree. Where there are too few
        replicas for both roles, each does both.
        """
        num_prefill, num_decode = self._num_by_role
        ordered = sorted(
            (one for one in self.replicas if one.facts.transfers_blocks), key=lambda one: one.facts.replica_id
        )
        self.has_roles = bool(num_prefill or num_decode) and len(ordered) > max(num_prefill, 1)
        for replica in self.replicas:
            replica.role = Role.BOTH
        for number, replica in enumerate(ordered if self.has_roles else ()):
            if number < num_prefill:
                replica.role = Role.PREFILL
            elif number < num_prefill + num_decode:
                replica.role = Role.DECODE

    def not_for(self, *, is_long: bool) -> list[Slot]:
        """Slots of replicas that get no long prompts, or nothing but them."""
        role = Role.DECODE if is_long else Role.PREFILL
        return [replica.slot for replica in self.replicas if replica.role is role]

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

"""State of a replica that is up, and of a model: load, attempts, versions."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from holdfast.router.config import PolicyName
from holdfast.router.dispatch.circuit_breaker import CircuitBreaker
from holdfast.router.dispatch.load_table import LoadTable
from holdfast.router.dispatch.policy import CLOSED, TOKENS_PER_SEQUENCE, Slot
from holdfast.router.dispatch.prefix_index import PrefixIndex
from holdfast.router.dispatch.role_split import Computed, RoleSplit
from holdfast.router.dispatch.roles import MOVE_BYTE_S, Role, Roles
from holdfast.worker.model_info import ModelInfo, ReplicaFacts
from holdfast.worker.request import BlockSource, EngineLoad
from holdfast.worker.step_update import EngineStats, StepUpdate

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
        """Cancels the timer without an event: its cause is gone."""
        self._last = None

    @property
    def mean_s(self) -> float | None:
        """None as long as no two events followed each other."""
        return self._sum_s / self._weight if self._weight else None

    def wait_s(self, num_ahead: int) -> float:
        """Estimated wait in seconds behind this number of requests; 0 while nothing was measured."""
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
        self._kv_version = facts.kv_version
        self.role = Role.BOTH
        self.host = facts.address.rpartition(":")[0]
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
        self.heir: ReplicaState | None = None
        """Replica that takes over the pinned prefixes of this retiring one."""
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
        """The replica was lost. Remaining notes of it have no effect: its slot may belong to another replica."""
        self._is_up = False
        self.breaker.on_change = None
        self.cached.close()
        self._table.remove(self.slot)

    @property
    def score(self) -> float:
        """Load for `policy.py`: sequences, plus prompt tokens to compute in units of `TOKENS_PER_SEQUENCE`; as last
        reported, plus the requests sent since.

        All attempts of this router there are a lower bound: a report may have been sent before a submission arrived.
        """
        load = self.load
        num_sequences = max(load.num_running + load.num_waiting + self._num_sent, len(self.attempts))
        return num_sequences + (load.num_waiting_tokens + self._num_sent_tokens) / TOKENS_PER_SEQUENCE

    @property
    def num_tokens_ahead(self) -> int:
        """Prompt tokens that a request sent there now would wait for."""
        return self.load.num_waiting_tokens + self._num_sent_tokens

    def sends_blocks_to(self, other: "ReplicaState") -> bool:
        """Whether another replica can take its blocks, as far as it is known here."""
        return bool(self.facts.transfers_blocks and self.facts.address) and self._kv_version == other._kv_version

    def as_source(
        self, num_tokens: int, other: "ReplicaState", *, is_computing: bool = False, is_leaving: bool = False
    ) -> BlockSource:
        """A block source for another replica: this one has, or computes, the blocks of this number of tokens."""
        size = 0 if self.facts.block_size == other.facts.block_size else self.facts.block_size
        return BlockSource(self.facts.address, num_tokens, is_computing, size, is_leaving)

    def hands_pins_to(self, other: "ReplicaState") -> bool:
        """Whether another replica can take its pinned prefixes, of which there are hashes of blocks alone."""
        return self.sends_blocks_to(other) and self.facts.block_size == other.facts.block_size

    def move_token_s(self, sender: "ReplicaState") -> float:
        """Seconds a token whose blocks come from another replica: as measured from its host, else as usual."""
        speeds: Mapping[str, float] = {} if self.stats is None else self.stats.received_bytes_per_s
        speed = speeds.get(sender.host) or speeds.get("")
        return self.facts.kv_bytes_per_token * (1 / speed if speed else MOVE_BYTE_S)

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
        """Replaces the load by the replica's report, and resets the count of requests sent since the last report."""
        self.load = load
        self._num_sent = 0
        self._num_sent_tokens = 0
        self._refresh()

    @property
    def computed(self) -> Computed:
        """Prompt tokens that it has reported to have computed."""
        if self.stats is None:
            return Computed(self.facts.replica_id, 0, 0.0)
        num_tokens = self.stats.num_tokens_computed - self.stats.num_tokens_generated
        return Computed(self.facts.replica_id, num_tokens, self.stats.prefill_tokens_per_s)

    def note_memory(self, update: StepUpdate) -> None:
        """Takes the cache events and the stats of an update, if it has any."""
        if update.cache.stored or update.cache.evicted:
            self.cached.apply(update.cache.stored, update.cache.evicted)
        if update.stats is not None:
            self.stats = update.stats
            if update.stats.prefill_tokens_per_s > 0:
                self._table.set_speed(self.slot, update.stats.prefill_tokens_per_s)
            if update.stats.adapter_load_s > 0:
                self._table.adapter_s = update.stats.adapter_load_s

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

    def __init__(
        self, facts: ModelInfo, policy: PolicyName, num_decode: int = 0, split: RoleSplit | None = None
    ) -> None:
        """`num_decode` as for `Roles`; `split` has the number of replicas for prompts, None: there are none."""
        self.facts = facts
        self.policy = policy
        self.split = split or RoleSplit(0, None)
        self.roles = Roles(self.split.number, num_decode)
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

    @property
    def has_roles(self) -> bool:
        """Whether some of its replicas have a role now, and can hand requests on."""
        return bool(self.table.parts)

    def follow_load(self, now: float) -> None:
        """Decides on the number of replicas for prompts, once in a while."""
        able = [replica for replica in self.replicas if replica.facts.transfers_blocks and not replica.is_retiring]
        if self.split.is_due(now) and self.split.look((replica.computed for replica in able), now):
            self.roles.num_prefill = self.split.number
            self._assign_roles()

    def _assign_roles(self) -> None:
        able = (replica.facts.replica_id for replica in self.replicas if replica.facts.transfers_blocks)
        roles = self.roles.assign(able)
        for replica in self.replicas:
            replica.role = roles.get(replica.facts.replica_id, Role.BOTH)
        if roles:
            self.table.divide(self._without(Role.PREFILL), self._without(Role.DECODE))
        else:
            self.table.divide()

    def _without(self, role: Role) -> int:
        """Slots of the replicas of all other roles, as an integer's bits."""
        return sum(1 << replica.slot for replica in self.replicas if replica.role is not role)

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

"""Replica registry: the replicas that are up, their last reported load, and this router's attempts on each.

A replica is *up* from its hello to the loss of its link, and *retiring* while it is up but accepts no new requests.
What may live here: the state of replicas and models, and the choice of a replica. What may not: requests
(`router/dispatch/`), dialling (`router/links/link.py`).
"""

from collections.abc import Iterator
from dataclasses import replace

from holdfast.router.config import PolicyName, RouterConfig
from holdfast.router.events import ModelStatus, ReplicaLoad
from holdfast.router.replicas.circuit_breaker import CircuitBreaker
from holdfast.router.replicas.load_table import LoadTable
from holdfast.router.replicas.policy import CLOSED, POLICIES, RandomIndex, Slot, load_score
from holdfast.router.replicas.prefix_index import NO_MATCH, PrefixIndex, PromptPrefix
from holdfast.worker.errors import UnknownModelError
from holdfast.worker.model_info import ModelInfo, ReplicaFacts
from holdfast.worker.request import EngineLoad
from holdfast.worker.stats import EngineStats
from holdfast.worker.step_update import StepUpdate


class ReplicaState:
    """One replica that is up. Whatever changes its load or whether it is open is told to its model's load table."""

    def __init__(
        self, facts: ReplicaFacts, load: EngineLoad, breaker: CircuitBreaker, table: LoadTable, max_waiting: int
    ) -> None:
        self.facts = facts
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
        self._num_sent += 1
        self._num_sent_tokens += num_tokens
        self._refresh()

    def note_end(self, attempt: int) -> None:
        """An attempt is no longer this router's."""
        self.attempts.remove(attempt)
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
        """Whether it may get a new attempt. A trial proves nothing on a replica with suspects of other routers."""
        is_fit = not is_trial or self.load.num_foreign_suspects == 0
        return is_fit and not self._is_retiring and self.breaker.rests_until is None and self._has_room()

    def _has_room(self) -> bool:
        """Whether a request sent now would find fewer than the configured number ahead of it.

        A replica without attempts of this router always has room: its load may be stale, and only steps refresh it.
        """
        return not self.attempts or self.load.num_waiting + self._num_sent < self._max_waiting

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


class ReplicaRegistry:
    """All replicas, by id and by model."""

    def __init__(self, config: RouterConfig, random_index: RandomIndex) -> None:
        self._config = config
        self._random_index = random_index
        self._replicas: dict[str, ReplicaState] = {}
        self._models: dict[str, ModelState] = {}
        self._breakers: dict[str, CircuitBreaker] = {}
        """Of replicas that are up, and of lost ones with recent failures."""
        self._retiring: dict[str, ReplicaState] = {}
        self._removed_models: frozenset[str] = frozenset()

    def add(self, facts: ReplicaFacts, load: EngineLoad, now: float) -> None:
        """A replica came up. It must not be up already."""
        assert facts.replica_id not in self._replicas, f"replica {facts.replica_id} is up already"
        self._forget_breakers(now)
        breaker = self._breakers.setdefault(facts.replica_id, CircuitBreaker())
        breaker.end_rest(now)
        model = self._models.get(facts.model)
        if model is None:
            model = self._models[facts.model] = ModelState(facts, self._config.policy_of(facts.model))
        replica = ReplicaState(facts, load, breaker, model.table, self._config.max_waiting_per_replica)
        self._replicas[facts.replica_id] = model.by_slot[replica.slot] = replica
        model.replicas.append(replica)
        model.down_since = None
        model.refresh_facts()

    def remove(self, replica_id: str, now: float) -> ReplicaState | None:
        """A replica was lost. Returns its state, or None if it was not up."""
        replica = self._replicas.pop(replica_id, None)
        self._retiring.pop(replica_id, None)
        if replica is not None:
            model = self._models[replica.facts.model]
            model.replicas.remove(replica)
            del model.by_slot[replica.slot]
            replica.leave()
            model.down_since = None if model.replicas else now
            model.refresh_facts()
        return replica

    def __iter__(self) -> Iterator[ReplicaState]:
        return iter(self._replicas.values())

    def get(self, replica_id: str) -> ReplicaState | None:
        return self._replicas.get(replica_id)

    def choose(
        self, model: str, prefix: PromptPrefix, session_id: str = "", *, is_trial: bool = False
    ) -> ReplicaState | None:
        """The replica for a request by its model's routing policy, or None if none is up and has room."""
        state = self._models[model]
        table = state.table
        match = table.holders.match(prefix) if state.policy == "prefix_aware" else NO_MATCH
        snapshot = table.snapshot(self._random_index, prefix.num_prompt_tokens, match, session_id)
        if is_trial:
            snapshot = snapshot.without([one.slot for one in state.replicas if not one.takes_more(is_trial=True)])
        if not snapshot.num_open:
            return None
        table.last = POLICIES[state.policy](snapshot)
        return state.by_slot[table.last]

    def retire(self, replica: ReplicaState, is_retiring: bool) -> None:
        """Marks a replica as retiring, or no longer so."""
        replica.is_retiring = is_retiring
        if is_retiring:
            self._retiring[replica.facts.replica_id] = replica
        else:
            self._retiring.pop(replica.facts.replica_id, None)

    def retiring(self, model: str) -> list[ReplicaState]:
        """Retiring replicas of a model that still run attempts of this router."""
        return [replica for replica in self._retiring.values() if replica.facts.model == model and replica.attempts]

    def end_rests(self, now: float) -> None:
        """Closes the circuit breakers whose rest is over."""
        for replica in self._replicas.values():
            replica.breaker.end_rest(now)

    def rests(self) -> Iterator[float]:
        """The times at which the rests of replicas end."""
        for replica in self._replicas.values():
            if replica.breaker.rests_until is not None and not replica.is_retiring:
                yield replica.breaker.rests_until

    def model(self, name: str) -> ModelState:
        """Raises `UnknownModelError` for a model that has never been served here, or was taken away."""
        if name not in self._models or name in self._removed_models:
            raise self.unknown(name)
        return self._models[name]

    def unknown(self, name: str) -> UnknownModelError:
        """The refusal of a model that is not served here."""
        return UnknownModelError(name, tuple(model.name for model in self.models()))

    def models(self) -> tuple[ModelStatus, ...]:
        """Every model that has been served here and was not taken away, in the order in which they first appeared."""
        return tuple(
            ModelStatus(name=name, facts=model.facts, num_replicas=len(model.replicas))
            for name, model in self._models.items()
            if name not in self._removed_models
        )

    def set_removed(self, names: frozenset[str]) -> None:
        """These models are taken away, and all others are not. Replicas of theirs that are up may finish what runs."""
        self._removed_models = names

    def is_removed(self, name: str) -> bool:
        """Whether a model was taken away."""
        return name in self._removed_models

    def loads(self) -> tuple[ReplicaLoad, ...]:
        return tuple(
            ReplicaLoad(
                replica_id=replica_id,
                model=replica.facts.model,
                load=replica.load,
                stats=replica.stats,
                num_ranks=replica.facts.tensor_parallel_size,
            )
            for replica_id, replica in self._replicas.items()
        )

    def outages(self) -> Iterator[tuple[str, float]]:
        """The models without a replica, and the times of their loss."""
        for name, model in self._models.items():
            if model.down_since is not None:
                yield name, model.down_since

    def check_integrity(self) -> None:
        """Asserts that the tables by replica and by model agree."""
        by_model = [replica for model in self._models.values() for replica in model.replicas]
        assert len(by_model) == len(self._replicas)
        for name, model in self._models.items():
            model.table.check_integrity()
            assert (model.down_since is None) == bool(model.replicas), f"{name}: down yet up"
            assert all(replica.facts.model == name for replica in model.replicas)
        for replica_id, replica in self._replicas.items():
            assert replica.facts.replica_id == replica_id
            assert replica.is_retiring == (replica_id in self._retiring)
            assert replica.breaker is self._breakers[replica_id]
            assert replica in by_model
            expected = replica.score if replica.takes_more() else CLOSED
            assert self._models[replica.facts.model].table.scores[replica.slot] == expected, f"{replica_id}: load"

    def _forget_breakers(self, now: float) -> None:
        """Drops the breakers of lost replicas that no longer matter."""
        for replica_id, breaker in list(self._breakers.items()):
            if replica_id not in self._replicas and breaker.is_forgotten(now):
                del self._breakers[replica_id]

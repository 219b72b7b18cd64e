"""Replica registry: the replicas that are up, their last reported load, and this router's attempts on each.

A replica is *up* from its hello to the loss of its link, and *retiring* while it is up but accepts no new requests.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from holdfast.router.config import PREFIX_POLICIES, RouterConfig
from holdfast.router.dispatch.circuit_breaker import CircuitBreaker
from holdfast.router.dispatch.load_table import PartOfLoads
from holdfast.router.dispatch.policy import CLOSED, POLICIES, RandomIndex, RoutingSnapshot, set_bits
from holdfast.router.dispatch.prefix_index import NO_MATCH
from holdfast.router.dispatch.replica_state import ModelState, ReplicaState
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.role_split import RoleSplit
from holdfast.router.dispatch.roles import Role, elsewhere_s, local_s
from holdfast.router.dispatch.versions import position
from holdfast.router.events import ModelStatus, ReplicaLoad, SendTakePins
from holdfast.router.operator_state import NO_OPERATOR_STATE, OperatorState
from holdfast.worker.errors import UnknownModelError
from holdfast.worker.model_info import ReplicaFacts
from holdfast.worker.request import BlockSource, EngineLoad

MAX_ADDRESSES: Final = 10_000  # of replicas that are up or were lost
MAX_MISSING: Final = 100
"""Versions without a replica that a model remembers."""


class ReplicaRegistry:
    """All replicas, by id and by model."""

    def __init__(self, config: RouterConfig, random_index: RandomIndex) -> None:
        self._config = config
        self._random_index = random_index
        self.replicas: dict[str, ReplicaState] = {}
        """Replicas that are up, by id. Read-only."""
        self._models: dict[str, ModelState] = {}
        self._breakers: dict[str, CircuitBreaker] = {}
        """Circuit breakers of replicas that are up, and of lost ones with recent failures."""
        self.retiring: dict[str, ReplicaState] = {}
        """Replicas that are up and take no new requests."""
        self.statuses: dict[str, ModelStatus] = {}
        """Every model that has been served here and was not taken away, in the order in which they first appeared."""
        self._removed_models: frozenset[str] = frozenset()
        self.asleep: Mapping[str, float] = {}
        """Models that the autoscaler may leave without replicas, with the seconds that requests wait for one."""
        self._operator_state = NO_OPERATOR_STATE
        self._ids: dict[str, str] = {}
        """Ids by the addresses of links, also of replicas that were lost: their blocks may have gone to others."""

    def add(self, facts: ReplicaFacts, load: EngineLoad, now: float) -> None:
        """A replica came up. It must not be up already."""
        assert facts.replica_id not in self.replicas, f"replica {facts.replica_id} is up already"
        self._forget_breakers(now)
        breaker = self._breakers.setdefault(facts.replica_id, CircuitBreaker())
        breaker.end_rest(now)
        model = self._models.get(facts.model)
        if model is None:
            split = RoleSplit(
                self._config.prefill_replicas, self._config.max_prefill_replicas, self._config.prefill_tokens
            )
            policy = self._config.policy_of(facts.model)
            model = self._models[facts.model] = ModelState(facts, policy, self._config.decode_replicas, split)
        max_waiting, max_ttft_s = self._config.max_waiting_per_replica, self._config.max_ttft_s
        replica = ReplicaState(facts, load, breaker, model.table, max_waiting, max_ttft_s)
        self.replicas[facts.replica_id] = model.by_slot[replica.slot] = replica
        self._ids[facts.address] = facts.replica_id
        if len(self._ids) > MAX_ADDRESSES:
            del self._ids[next(iter(self._ids))]
        model.replicas.append(replica)
        model.refresh(now)
        self._refresh_statuses()

    def remove(self, replica_id: str, now: float) -> ReplicaState | None:
        """A replica was lost. Returns its state, or None if it was not up."""
        replica = self.replicas.pop(replica_id, None)
        self.retiring.pop(replica_id, None)
        if replica is not None:
            model = self._models[replica.facts.model]
            model.replicas.remove(replica)
            del model.by_slot[replica.slot]
            replica.close()
            model.refresh(now)
            self._refresh_statuses()
        return replica

    def __iter__(self) -> Iterator[ReplicaState]:
        return iter(self.replicas.values())

    def get(self, replica_id: str) -> ReplicaState | None:
        return self.replicas.get(replica_id)

    def choose(self, state: RequestState, version: str = "") -> ReplicaState | None:
        """The replica for a request by its model's routing policy, or None if no replica is up and has room.

        With a `version`, one of that version alone. A request without a version goes to a canary by its id: the canary
        gets its share; requests that find no room there go to the other replicas, and all others never go to the canary
        unless it is the only one.
        """
        model, is_trial = self._models[state.model], state.is_suspect
        if len(model.replicas) == 1:  # as on one machine: there is nothing to choose
            only = model.replicas[0]
            return only if version in ("", only.version) and only.takes_more(is_trial=is_trial) else None
        table = model.table
        state.prefix_match = table.holders.match(state.prefix) if model.policy in PREFIX_POLICIES else NO_MATCH
        if model.has_roles:
            chosen = self._choose_by_role(model, state, version)
        else:
            chosen = self._pick(model, self._snapshot(model, state, version))
        if chosen is not None:
            table.last = chosen.slot
        return chosen

    def _snapshot(
        self, model: ModelState, state: RequestState, version: str, part: PartOfLoads | None = None
    ) -> RoutingSnapshot:
        """Replicas of a model, or of a part of it, that may get a request now."""
        request, is_trial = state.request, state.is_suspect
        num_tokens, session_id = len(request.prompt_token_ids), request.session_id
        snapshot = model.table.snapshot(self._random_index, num_tokens, state.prefix_match, session_id, part)
        if is_trial:
            snapshot = snapshot.without([one.slot for one in model.replicas if not one.takes_more(is_trial=True)])
        if version and model.versions != {version}:
            snapshot = snapshot.without(model.others_than(version))
        elif not version and len(model.versions) > 1:
            snapshot = self._shared(model, snapshot, request.request_id)
        return snapshot

    @staticmethod
    def _pick(model: ModelState, snapshot: RoutingSnapshot) -> ReplicaState | None:
        return model.by_slot[POLICIES[model.policy](snapshot)] if snapshot.num_open else None

    def _choose_by_role(self, model: ModelState, state: RequestState, version: str) -> ReplicaState | None:
        """The replica that computes a request's prompt: the decode replica, unless a prefill replica finishes sooner,
        or no decode replica takes requests.
        """
        state.next_replica_id = ""
        near, far = (self._snapshot(model, state, version, part) for part in model.table.parts)
        target, helper = self._pick(model, near), None
        if target is None or not (state.output_token_ids or state.request.group_id):
            helper = self._pick(model, far)
        if target is None or helper is None:
            return target or helper
        if helper.role is not Role.PREFILL or not self._is_sooner_elsewhere(model, state, near, far, target, helper):
            return target
        state.next_replica_id = target.facts.replica_id
        return helper

    def _is_sooner_elsewhere(
        self,
        model: ModelState,
        state: RequestState,
        near: RoutingSnapshot,
        far: RoutingSnapshot,
        target: ReplicaState,
        helper: ReplicaState,
    ) -> bool:
        """Whether `helper` should compute a prompt that `target` decodes then. `near` and `far`: the candidates of the
        choice.
        """
        num_tokens, match = near.num_prompt_tokens, state.prefix_match
        if self._config.prefill_tokens is not None:
            cached = near.prefix.holders[0][0] if near.prefix.holders else 0
            return num_tokens - cached >= self._config.prefill_tokens
        here = match.num_cached(target.slot)
        token_s, move_s = near.token_s_of(target.slot), target.move_token_s(helper)
        hand_on_s = model.roles.hand_on_s
        moved = num_tokens - here
        if hand_on_s + moved * move_s >= moved * token_s:
            return False
        cached = match.holders[0][0] if match.holders else 0
        num_new = target.num_tokens_ahead + num_tokens - cached
        local = local_s(num_new, cached - here, token_s, move_s, target.load.num_running)
        num_there = helper.num_tokens_ahead + num_tokens - match.num_cached(helper.slot)
        return elsewhere_s(num_there, far.token_s_of(helper.slot), moved, move_s, hand_on_s) < local

    def note_prompt(self, state: RequestState, now: float) -> None:
        """A request has come: the roles of its model's replicas may follow the load."""
        model = self._models.get(state.model)
        if model is not None and model.split.follows_load:
            model.split.note_prompt(len(state.request.prompt_token_ids), now)
            model.follow_load(now)

    def note_hand_on(self, state: RequestState, pause_s: float) -> None:
        """Notes the seconds from a request's hand-over to its first output on the new replica."""
        self._models[state.model].roles.note_hand_on(pause_s, state.handed_on[1])

    def block_source(self, state: RequestState, target: ReplicaState) -> BlockSource | None:
        """Another replica with more of a request's prefix than the chosen one: its last replica, or one that has the
        prompt cached. None: there is none. The replica decides whether computing is sooner.
        """
        model, num_here = self._models[state.model], state.prefix_match.num_cached(target.slot)
        before = self.replicas.get(state.replica_id)
        if before is not None and state.output_token_ids:
            there = [(len(state.request.prompt_token_ids) + len(state.output_token_ids), 1 << before.slot)]
        else:
            there = list(state.prefix_match.holders)
        for num_tokens, mask in there:
            if num_tokens <= num_here:
                return None
            for slot in set_bits(mask):
                replica = model.by_slot.get(slot)
                if replica is not None and replica is not target and replica.sends_blocks_to(target):
                    return replica.as_source(num_tokens, target)
        return None

    def retire(self, replica: ReplicaState, is_retiring: bool) -> list[SendTakePins]:
        """Marks a replica as retiring, or no longer so."""
        replica.is_retiring = is_retiring
        if is_retiring:
            self.retiring[replica.facts.replica_id] = replica
        else:
            self.retiring.pop(replica.facts.replica_id, None)
            replica.heir = None
        return self.hand_pins_on()

    def hand_pins_on(self) -> list[SendTakePins]:
        """For each retiring replica without an heir: the replica that will pin its pinned prefixes, if there is one.
        All routers choose the same: of those with the most blocks, the first by its id.
        """
        actions = []
        for replica in self.retiring.values():
            others = self._models[replica.facts.model].replicas
            heirs = [one for one in others if not one.is_retiring and replica.hands_pins_to(one)]
            if heirs and replica.heir not in heirs:
                replica.heir = min(heirs, key=lambda one: (-one.facts.num_blocks, one.facts.replica_id))
                actions.append(SendTakePins(replica_id=replica.heir.facts.replica_id, address=replica.facts.address))
        return actions

    def retiring_of(self, model: str) -> list[ReplicaState]:
        """Retiring replicas of a model that still run attempts of this router."""
        return [replica for replica in self.retiring.values() if replica.facts.model == model and replica.attempts]

    def end_rests(self, now: float) -> None:
        """Closes the circuit breakers whose rest is over."""
        for replica in self.replicas.values():
            replica.breaker.end_rest(now)

    def rests(self) -> Iterator[float]:
        """The times at which the rests of replicas end."""
        for replica in self.replicas.values():
            if replica.breaker.rests_until is not None and not replica.is_retiring:
                yield replica.breaker.rests_until

    def model(self, name: str) -> ModelState:
        """Raises `UnknownModelError` for a model that has never been served here, or was taken away."""
        if name not in self._models or name in self._removed_models:
            raise self.unknown(name)
        return self._models[name]

    def unknown(self, name: str) -> UnknownModelError:
        """The refusal of a model that is not served here."""
        return UnknownModelError(name, tuple(self.statuses))

    def set_removed(self, names: frozenset[str]) -> None:
        """These models are taken away, and all others are not. Their replicas that are up may finish running
        requests.
        """
        self._removed_models = names
        self._refresh_statuses()

    def is_removed(self, name: str) -> bool:
        """Whether a model was taken away."""
        return name in self._removed_models

    def set_asleep(self, waits_s: Mapping[str, float]) -> None:
        """Sets the models that may be scaled to zero, and the seconds that their requests wait for a replica."""
        self.asleep = waits_s
        self._refresh_statuses()

    def unknown_sleepers(self) -> tuple[str, ...]:
        """Models that may be at rest, and have never been served here."""
        return tuple(name for name in self.asleep if name not in self._models and name not in self._removed_models)

    def note_wake(self, name: str, now: float) -> None:
        """A request came for a model: if it has no replica, it is without one as of now."""
        model = self._models.get(name)
        if model is not None and not model.replicas:
            model.down_since = now

    def loads(self) -> tuple[ReplicaLoad, ...]:
        """Load, statistics and version of each replica."""
        return tuple(
            ReplicaLoad(
                replica_id=replica_id,
                model=replica.facts.model,
                load=replica.load,
                stats=replica.stats,
                version=replica.version,
                is_retiring=replica.is_retiring,
                num_ranks=replica.facts.tensor_parallel_size,
                role=replica.role.value if self._models[replica.facts.model].has_roles else "",
                received_from=self._senders(replica),
            )
            for replica_id, replica in self.replicas.items()
        )

    def _senders(self, replica: ReplicaState) -> dict[str, int]:
        """Tokens that a replica has received, by the senders' ids in order."""
        found = {} if replica.stats is None else replica.stats.received_tokens_from
        by_id: dict[str, int] = {}
        for address, num_tokens in found.items():
            sender = self._ids.get(address, address)
            by_id[sender] = by_id.get(sender, 0) + num_tokens
        return dict(sorted(by_id.items()))

    def _shared(self, state: ModelState, snapshot: RoutingSnapshot, key: str) -> RoutingSnapshot:
        """A model's replicas for a request, where a canary gets a share."""
        canary = self._operator_state.canary_of(state.facts.model)
        if canary is None or canary.version not in state.versions:
            return snapshot
        others = state.others_than(canary.version)
        if position(key) < canary.share:
            chosen = snapshot.without(others)
            if chosen.num_open:
                return chosen
        return snapshot.without([one.slot for one in state.replicas if one.slot not in others])

    def set_operator_state(self, operator_state: OperatorState) -> None:
        """Applies the given operator state."""
        self._operator_state = operator_state

    def is_gone(self, model: str, version: str, now: float) -> bool:
        """Whether a version has no replica, and will not or did not get one in time."""
        gone_at = self.gone_at(model, version)
        return gone_at is not None and now >= gone_at

    def is_mixed(self, model: str, version: str) -> bool:
        """Whether a request that is bound to a version may find no replica where others do."""
        versions = self._models[model].versions
        return bool(versions) and versions != {version}

    def want_version(self, model: str, version: str, now: float) -> None:
        """A request is bound to this version: if no replica has it, one is waited for from now on."""
        state = self._models[model]
        if version not in state.versions and version not in state.missing:
            state.missing[version] = now
            if len(state.missing) > MAX_MISSING:
                del state.missing[next(iter(state.missing))]

    def gone_at(self, model: str, version: str) -> float | None:
        """When a version that no replica has is given up, a retired one at once; None for a prefix that a replica
        has.
        """
        since = self._models[model].missing.get(version)
        if since is None or (model, version) in self._operator_state.retired:
            return since
        return since + self._config.replica_wait_s

    def outages(self) -> Iterator[tuple[str, float]]:
        """The models without a replica, and the times of their loss."""
        for name, model in self._models.items():
            if model.down_since is not None:
                yield name, model.down_since

    def check_integrity(self) -> None:
        """Asserts that the tables by replica and by model agree."""
        by_model = [replica for model in self._models.values() for replica in model.replicas]
        assert len(by_model) == len(self.replicas)
        for name, model in self._models.items():
            model.table.check_integrity()
            assert (model.down_since is None) == bool(model.replicas), f"{name}: down yet up"
            assert all(replica.facts.model == name for replica in model.replicas)
        for replica_id, replica in self.replicas.items():
            assert replica.facts.replica_id == replica_id
            assert replica.is_retiring == (replica_id in self.retiring)
            assert replica.breaker is self._breakers[replica_id]
            assert replica in by_model
            expected = replica.score if replica.takes_more() else CLOSED
            assert self._models[replica.facts.model].table.scores[replica.slot] == expected, f"{replica_id}: load"

    def _refresh_statuses(self) -> None:
        self.statuses = {
            name: ModelStatus(name=name, facts=model.facts, num_replicas=len(model.replicas), wakes=name in self.asleep)
            for name, model in self._models.items()
            if name not in self._removed_models
        }

    def _forget_breakers(self, now: float) -> None:
        """Drops the breakers of lost replicas that no longer matter."""
        for replica_id, breaker in list(self._breakers.items()):
            if replica_id not in self.replicas and breaker.is_forgotten(now):
                del self._breakers[replica_id]

"""Placement: assigns waiting requests to replicas, and moves requests off replicas that are lost or being drained."""

from collections.abc import Iterator
from itertools import chain
from typing import Final

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.admission import AdmissionQueue
from holdfast.router.dispatch.failures import Quarantine
from holdfast.router.dispatch.live_moves import LiveMoves
from holdfast.router.dispatch.policy import LOAD_BOUND
from holdfast.router.dispatch.replica_registry import ReplicaRegistry
from holdfast.router.dispatch.replica_state import ReplicaState
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_stats import DispatchStats
from holdfast.router.dispatch.request_status import RequestEvent, RequestStatus
from holdfast.router.dispatch.request_table import RequestTable
from holdfast.router.dispatch.roles import Role
from holdfast.router.events import Action, SendAbort, SendAhead, SendSubmit
from holdfast.router.token_bucket import TokenBucket
from holdfast.worker.config import ServiceOrderConfig
from holdfast.worker.errors import CapacityError, Fault, HoldfastError
from holdfast.worker.request import NUM_STEPS_TO_CLEAR, PoisonRisk

MAX_FULL_S: Final = 1.0
"""Longest time that a replica gets no new requests after it refused one for lack of room."""

MAX_REFUSALS: Final = 4
"""Attempts in a row that may fail on replicas that stay up. With more, the request is the likelier cause."""


class Placement:
    """Assigns requests to replicas. At most one attempt of a request runs at a time."""

    def __init__(
        self,
        config: RouterConfig,
        limits: LimitsConfig,
        order: ServiceOrderConfig,
        registry: ReplicaRegistry,
        requests: RequestTable,
    ) -> None:
        self.queue = AdmissionQueue(limits.max_queued, order, config.max_ttft_s)
        self.quarantine = Quarantine(config.max_replicas_lost)
        self.stats = DispatchStats()
        self._retries = TokenBucket(config.retries_per_s, config.retry_burst)
        self._retry_share = config.retry_share
        self._registry = registry
        self._requests = requests
        self.live_moves = LiveMoves(registry)
        self.prefilled: dict[RequestState, None] = {}
        """Requests whose prompt was computed by a replica that hands them over; ended ones are dropped when they are
        next looked at.
        """

    # --- attempts begin ---

    def admit(self, state: RequestState, now: float) -> ReplicaState | None:
        """The replica for a new request; None if it must wait, and then it is queued. Raises `QueueFullError`."""
        replica = None if self.queue.first(state.model) is not None else self._choose(state)
        if replica is None:
            self.queue.push(state, now)
        else:
            self.queue.charge_at_once(state)
        if self._retries.level < self._retries.capacity:
            self._retries.give(self._retry_share)
        return replica

    def send(
        self,
        state: RequestState,
        replica: ReplicaState,
        now: float,
        event: RequestEvent = RequestEvent.SEND,
        *,
        has_blocks: bool = False,
    ) -> SendSubmit:
        """Begins an attempt: the request continues after its output so far. `has_blocks`: the replica needs no source
        of blocks.
        """
        self.stats.note_sent(state, replica.facts.replica_id, now)
        source = None
        if not has_blocks and replica.facts.transfers_blocks and (state.replica_id or state.prefix_match.holders):
            source = self._registry.block_source(state, replica)
        attempt = self._requests.begin_attempt(state, replica, event, now)
        if replica.breaker.num_failures:
            replica.breaker.note_sent(now)
        poison_risk = self.quarantine.poison_risk(state) if state.num_replicas_lost_in_a_row else PoisonRisk.NONE
        request = state.continuation(max(0.0, state.deadline - now), poison_risk, source)
        return SendSubmit(replica_id=replica.facts.replica_id, attempt=attempt.number, request=request)

    def send_ahead(self, state: RequestState, replica: ReplicaState) -> list[Action]:
        """Announces a request that was just sent to `replica` to the replica that will decode it: blocks are
        transferred while the next ones are computed.
        """
        target = self._registry.get(state.next_replica_id)
        if target is None or replica.role is not Role.PREFILL or not replica.sends_blocks_to(target):
            return []
        assert state.attempt is not None, "it was just sent"
        source = replica.as_source(len(state.request.prompt_token_ids), target, is_computing=True)
        later = state.continuation(block_source=source)
        return [SendAhead(replica_id=target.facts.replica_id, attempt=state.attempt.number, request=later)]

    def drain(self, model: str, now: float) -> list[Action]:
        """Moves requests off retiring replicas, then sends waiting requests while there is room."""
        actions = self._vacate(model, now)
        if self.prefilled:
            actions += self._hand_on(now)
        if not self.queue.num_waiting:
            return actions
        self.queue.advance(model, now)
        while (found := self._next(model, now)) is not None:
            state, replica = found
            self.queue.pop(state, now)
            if state.status is RequestStatus.HELD:
                self.quarantine.begin_trial(state)
            if state.status.is_retry:
                self._retries.take(1.0, now)
            actions.append(self.send(state, replica, now))
            if state.next_replica_id:
                actions += self.send_ahead(state, replica)
        return actions

    def drain_all(self, now: float) -> list[Action]:
        """Drains the queues of all models."""
        if not self.queue.num_waiting:
            return []
        return [action for name in self._registry.statuses for action in self.drain(name, now)]

    # --- attempts bring output, or are taken back ---

    def note_step(self, state: RequestState, num_new_tokens: int, now: float, queued_s: float = 0.0) -> None:
        """An attempt has brought output: charges the tenant, and clears failure counts of request and replica.

        The first steps of an attempt clear it; later ones need no check.
        """
        state.tenant.charge(0, num_new_tokens)
        if state.num_steps >= NUM_STEPS_TO_CLEAR:
            return
        assert state.attempt is not None
        state.note(RequestEvent.OUTPUT)
        state.num_refusals = 0
        state.num_steps += 1
        if state.num_steps == NUM_STEPS_TO_CLEAR and state.num_replicas_lost_in_a_row:
            self.quarantine.clear(state)
        if state.num_steps == 1:
            if state.attempt.number == state.handed_on[0]:
                self._registry.note_hand_on(state, now - state.attempt.sent_at)
            if state.attempt.replica.role is Role.PREFILL and not state.request.group_id:
                self.prefilled[state] = None
            state.attempt.replica.note_first_output(state.attempt.number, now)
            self.stats.note_first_output(state, queued_s, now)

    def take_back(self, state: RequestState, error: HoldfastError, now: float) -> bool:
        """Requeues a request whose attempt was refused or given up by a replica that is up.

        False if it must not be retried, because the request is invalid or the likelier cause: then the caller ends it.
        """
        assert state.attempt is not None
        breaker = state.attempt.replica.breaker
        if isinstance(error, CapacityError):
            breaker.rest_until(now + min(error.retry_after_s or 1.0, MAX_FULL_S))
            self.put_back(state, RequestEvent.GIVE_BACK, now)
            return True
        if error.fault is not Fault.REPLICA:
            return False
        breaker.note_failure(now)
        state.num_refusals += 1
        if state.num_refusals > MAX_REFUSALS:
            return False
        self.put_back(state, RequestEvent.LOSE, now)
        return True

    def put_back(self, state: RequestState, event: RequestEvent, now: float) -> None:
        """Ends a failed attempt. The request waits ahead of new ones of its class, or for its trial."""
        self._requests.end_attempt(state)
        self.stats.note_taken_back(state, event, now)
        self.quarantine.end_trial(state)
        state.note(event)
        self.queue.put_back(state, now)

    def suspend(self, state: RequestState, now: float) -> SendAbort:
        """Takes back the attempt of a request whose client does not read: its replica has room for others."""
        attempt = self._requests.withdraw_attempt(state)
        self.stats.note_taken_back(state, RequestEvent.SUSPEND, now)
        state.note(RequestEvent.SUSPEND)
        return SendAbort(replica_id=attempt.replica.facts.replica_id, attempt=attempt.number)

    def go_on(self, state: RequestState, now: float) -> None:
        """Requeues a suspended request whose client has read its output, ahead of new requests of its class."""
        state.note(RequestEvent.CONTINUE)
        self.queue.put_back(state, now)

    def lose_all(self, replica: ReplicaState, now: float) -> list[RequestState]:
        """A replica was lost. Requeues its requests, except requests that must not be retried, which are returned.

        The loss of a retiring replica is expected, so its requests are not suspected.
        """
        lost, withdrawn = self._requests.on(replica), self._requests.pop_withdrawn(replica)
        is_sudden = bool(lost) and not replica.is_retiring
        if not replica.is_retiring:
            self.quarantine.count_withdrawn(withdrawn, replica, now)
        culprits = self.quarantine.culprits(lost, replica, now) if is_sudden else []
        if not replica.is_retiring:
            self.stats.replicas_lost[replica.facts.model] += 1
        if is_sudden:
            replica.breaker.note_failure(now)
        for state in lost:
            if state not in culprits:
                self.put_back(state, self._loss(state) if is_sudden else RequestEvent.GIVE_BACK, now)
        return culprits

    # --- time ---

    def refresh(self, now: float) -> None:
        """Ends rests that are over and fills the retry budget. To be called at the times of `wake_ups`."""
        self._registry.end_rests(now)
        self._retries.wait_s(now, 1.0)

    def wake_ups(self) -> Iterator[float]:
        """The times at which waiting requests may be sent without another event."""
        if not self.queue.num_waiting:
            return
        if (ready_at := self._retries.ready_at(1.0)) is not None:
            yield ready_at
        yield from self._registry.rests()

    def bound_in_vain(self, now: float) -> list[RequestState]:
        """Requests that wait for a version that has no replica and gets none."""
        return [
            state
            for model in self.queue.models_aside()
            for state in self.queue.aside(model)
            if (version := self._version(state)) and self._registry.is_gone(model, version, now)
        ]

    def ends_of_versions(self) -> Iterator[float]:
        """The times at which waiting requests are given up because their version has no replica."""
        for model in self.queue.models_aside():
            for version in {self._version(state) for state in self.queue.aside(model)} - {""}:
                gone_at = self._registry.gone_at(model, version)
                if gone_at is not None:
                    yield gone_at

    def check_integrity(self) -> None:
        """Asserts that every request is queued, or running on a replica that is up, or suspended."""
        self.queue.check_integrity()
        self.quarantine.check_integrity()
        num_running = sum(len(replica.attempts) for replica in self._registry)
        num_suspended = sum(state.status is RequestStatus.SUSPENDED for state in self._requests)
        assert len(self._requests) == self.queue.num_waiting + num_running + num_suspended
        num_waiting = sum(state.status.is_waiting for state in self._requests)
        num_queued = self.queue.num_waiting
        assert num_waiting == num_queued, f"{num_waiting} requests wait, {num_queued} of them in the queue"

    # --- inside ---

    def _loss(self, state: RequestState) -> RequestEvent:
        """The event of a request to retry after the crash of its replica. A trial without a verdict is only lost."""
        is_new = state.status is not RequestStatus.ON_TRIAL and state.is_suspect
        return RequestEvent.SUSPECT if is_new else RequestEvent.LOSE

    def _choose(self, state: RequestState) -> ReplicaState | None:
        version = state.version
        if state.request.group_id:
            version = self._version(state)
            if (home := self._beside(state, version)) is not None:
                return home
        return self._registry.choose(state, version)

    def _version(self, state: RequestState) -> str:
        """The version that must run it: that of its output, or of its siblings', which are the same client's."""
        return state.version or self._requests.version_of_group(state.request.group_id)

    def _beside(self, state: RequestState, version: str) -> ReplicaState | None:
        """The replica of the request's first sibling, if it has room: siblings share the prompt's KV cache there."""
        first = self._requests.get(state.key._replace(sequence_index=0))
        home = None if first is None or first.attempt is None else first.attempt.replica
        if home is None or version not in ("", home.version):
            return None
        return home if home.takes_more(is_trial=state.is_suspect) else None

    def _next(self, model: str, now: float) -> tuple[RequestState, ReplicaState] | None:
        """The request that leaves the queue now, and its replica.

        Retries go before new requests, even if the retry budget then makes all of them wait. A suspect for which no
        replica is eligible does not block the others, nor does a request whose version has no room: it is parked.
        """
        suspect = self.queue.first_held(model) if self.quarantine.is_free(model) else None
        waiting = chain((suspect, *self.queue.first_parked(model)), iter(lambda: self.queue.first(model), None))
        for state in waiting:
            if state is None or (state.parked_for and self._choose(state) is None):
                continue
            if state.status.is_retry and self._retries.wait_s(now, 1.0):
                return None
            replica = self._choose(state)
            if replica is not None:
                return state, replica
            if state.status is RequestStatus.HELD:
                continue
            version = self._version(state)
            if not version or not self._registry.is_mixed(model, version):
                return None
            self.queue.park(state, version)
        return None

    def _hand_on(self, now: float) -> list[Action]:
        """Moves requests whose prompt is computed to replicas that decode. If no replica has room, they stay for
        now.
        """
        actions: list[Action] = []
        for state in list(self.prefilled):
            if state.attempt is None or state.attempt.replica.role is not Role.PREFILL:
                del self.prefilled[state]
                continue
            target = None if state.status is RequestStatus.ON_TRIAL else self._next_of(state)
            if target is not None and target.role is not Role.PREFILL:
                del self.prefilled[state]
                moving_s = target.move_token_s(state.attempt.replica) * len(state.request.prompt_token_ids)
                actions += self._move(state, target, now)
                state.handed_on = state.attempt.number, moving_s
        return actions

    def _next_of(self, state: RequestState) -> ReplicaState | None:
        """The replica that decodes a request whose prompt is computed: the one with its blocks, unless it is busier
        than another.
        """
        planned, chosen = self._registry.get(state.next_replica_id), self._choose(state)
        if planned is None or chosen is None or not planned.takes_more() or planned.version != chosen.version:
            return chosen
        return planned if planned.score <= LOAD_BOUND * chosen.score + 1 else chosen

    def _move(self, state: RequestState, target: ReplicaState, now: float, *, has_blocks: bool = False) -> list[Action]:
        """Ends an attempt, and begins one on another replica."""
        attempt = self._requests.withdraw_attempt(state)
        self.stats.note_taken_back(state, RequestEvent.MOVE, now)
        abort = SendAbort(replica_id=attempt.replica.facts.replica_id, attempt=attempt.number)
        return [abort, self.send(state, target, now, RequestEvent.MOVE, has_blocks=has_blocks)]

    def _vacate(self, model: str, now: float) -> list[Action]:
        """Moves requests off retiring replicas, or their blocks first. If no other replica has room, they stay.

        A suspect without an eligible replica does not block other requests; neither does a request that is bound to a
        version.
        """
        actions: list[Action] = []
        full: set[str] = set()
        for replica in self._registry.retiring_of(model):
            for state in self._requests.on(replica):
                version = self._version(state)
                if version in full or self.live_moves.has_to_wait(state, now):
                    continue
                target = self._choose(state)
                if target is None and state.status is RequestStatus.ON_TRIAL:
                    continue
                if target is None and version and self._registry.is_mixed(model, version):
                    full.add(version)
                    continue
                if target is None:
                    return actions
                advice = self.live_moves.advise(state, target, now)
                if isinstance(advice, SendAhead):
                    actions.append(advice)
                else:
                    actions += self._move(state, advice.target, now, has_blocks=advice.has_blocks)
        return actions

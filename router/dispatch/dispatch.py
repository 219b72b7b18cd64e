"""Dispatcher core: which replica runs which request, and what each client gets. A state machine without IO.

Events come in as method calls that carry the time. Actions (`router/events.py`) come out as a list, in the order in
which to perform them. No sockets, tasks, clocks, random numbers or wire formats here.

A request waits or runs, or is suspended while its client does not read, until it ends, with one `OutputDelta` that has
a finish reason or with one Fail; its transitions are the table in `request_status.py`. A cancelled request ends without
either. A running request has an *attempt*, whose number this router never uses twice. Messages about an attempt that is
over are dropped, so a late message does no harm. Output tokens are counted by index: repeated tokens are dropped, and a
gap is a bug.

Failover: a lost attempt is replaced by a new one, which submits the prompt and the output so far and continues after
it. The text state is kept. A retiring replica is drained the same way. Clients see none of this.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.demand import ModelDemand
from holdfast.router.dispatch.demands import demands
from holdfast.router.dispatch.endings import Endings, StepOutputs
from holdfast.router.dispatch.failures import Outages
from holdfast.router.dispatch.placement import Placement
from holdfast.router.dispatch.policy import RandomIndex
from holdfast.router.dispatch.replica_registry import ReplicaRegistry
from holdfast.router.dispatch.replica_state import ReplicaState
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_status import RequestEvent, RequestStatus
from holdfast.router.dispatch.request_table import RequestTable
from holdfast.router.dispatch.versions import VersionCounts
from holdfast.router.events import Action, ModelStatus, ReplicaLoad
from holdfast.router.operator_state import OperatorState
from holdfast.worker.config import ServiceOrderConfig
from holdfast.worker.errors import (
    DeadlineExceededError,
    HoldfastError,
    RequestQuarantinedError,
    RequestSupersededError,
    VersionGoneError,
)
from holdfast.worker.model_info import ReplicaFacts, without_version
from holdfast.worker.request import EngineLoad, FinishReason, RequestKey, SequenceKey
from holdfast.worker.step_update import StepUpdate
from holdfast.worker.waiting_queue import DUE_AFTER_S


class Dispatch:
    """All open requests of one router. Not safe for threads; never blocks."""

    def __init__(
        self,
        config: RouterConfig,
        limits: LimitsConfig,
        random_index: RandomIndex,
        *,
        order: ServiceOrderConfig | None = None,
    ) -> None:
        """`order` is that of the replicas' own queues; None: the default."""
        self.registry = ReplicaRegistry(config, random_index)
        """The replicas and the models; others only read it."""
        self._requests = RequestTable()
        self._placement = Placement(config, limits, order or ServiceOrderConfig(), self.registry, self._requests)
        self._queue = self._placement.queue
        self._outages = Outages(self.registry, self._queue, config.replica_wait_s)
        self._num_submitted = 0
        self._endings = Endings(self._requests, self._placement)
        self._step_outputs = StepOutputs(self._requests, self._placement, self._endings)
        self.stats = self._placement.stats
        """Counts since the start."""

    # --- events from clients ---

    def submit(self, state: RequestState, now: float) -> list[Action]:
        """Opens a sequence of a request. From here on it ends exactly once: finished, failed or cancelled.

        One with output continues after it: that output was pushed into its `text`, and `caught_up` is the result. It
        must not be open: see `supersede`. Its timeline begins now. Raises the following errors and then keeps no state:
        `UnknownModelError`, `QueueFullError`, `ReplicaError` (no replica for too long), `VersionGoneError`,
        `DeadlineExceededError`.
        """
        model, deadline = state.model, state.deadline
        if self.registry.model(model).down_since is not None:
            self._outages.admit(model, now)
        if now >= deadline:
            raise DeadlineExceededError("the request's time was up before it could be queued")
        self._num_submitted += 1
        state.urgency = (min(deadline, now + DUE_AFTER_S), self._num_submitted)
        state.timeline.opened_s = now
        if version := state.version:
            self.registry.want_version(model, version, now)
            if self.registry.is_gone(model, version, now):
                raise _version_gone(state)
        self.registry.note_prompt(state, now)
        replica = self._placement.admit(state, now)
        self._requests.add(state)
        if not state.has_first_token:
            self.stats.first_tokens[model].num_arrived += 1
        actions: list[Action] = [] if replica is None else [self._placement.send(state, replica, now)]
        if replica is not None and state.next_replica_id:
            actions += self._placement.send_ahead(state, replica)
        if self._queue.num_waiting:  # a submission adds to the retry budget of all models
            actions += self._placement.drain_all(now)
        return actions

    def supersede(self, key: RequestKey, client_attempt: int, now: float) -> list[Action]:
        """Ends the open sequences of a request that is submitted again: the newer submission wins, with all its
        sequences.

        The newer submission has the higher number; with equal numbers, it is the later one. Raises
        `RequestSupersededError` if the open request is the newer one.
        """
        if key not in self._requests.by_request:
            return []
        states = self._requests.of_request(key)
        newest = max(state.client_attempt for state in states)
        if newest > client_attempt:
            stale = f"submission {client_attempt} of request {key.request_id} came after submission {newest}"
            raise RequestSupersededError(f"{stale}, which continues")
        error = RequestSupersededError(f"request {key.request_id} was submitted again; the newer submission continues")
        actions = self._endings.fail_all(states, error)
        for model in dict.fromkeys(state.model for state in states):
            actions += self._drain(model, now)
        return actions

    def check_newest(self, key: RequestKey) -> None:
        """Checks, for a caller that continues a request without open sequences, that there are none. Raises
        `RequestSupersededError` otherwise: then it was submitted again meanwhile.
        """
        if self._requests.of_request(key):
            newer = f"request {key.request_id} was submitted again; the newer submission continues"
            raise RequestSupersededError(newer)

    def cancel(self, key: SequenceKey, now: float) -> list[Action]:
        """The client has cancelled or disconnected. Unknown sequences are ignored."""
        state = self._requests.get(key)
        if state is None:
            return []
        return [*self._endings.close(state, RequestEvent.CANCEL), *self._drain(state.model, now)]

    def abort(self, key: SequenceKey, now: float) -> list[Action]:
        """Ends a sequence after the output that it has, with finish reason ABORT. Unknown streams are ignored."""
        state = self._requests.get(key)
        if state is None:
            return []
        delta = state.take((), FinishReason.ABORT)
        assert delta is not None, "the end of a sequence always makes a delta"
        delta = state.with_figures(delta, now)
        return [delta, *self._endings.close(state, RequestEvent.CANCEL), *self._drain(state.model, now)]

    def suspend(self, key: SequenceKey, now: float) -> list[Action]:
        """Suspends a request whose client does not read its output: no replica runs it meanwhile. Returns no actions
        for a request that no replica runs, or that is on trial, which continues.
        """
        state = self._requests.get(key)
        if state is None or state.attempt is None or state.status is RequestStatus.ON_TRIAL:
            return []
        return [self._placement.suspend(state, now), *self._drain(state.model, now)]

    def go_on(self, key: SequenceKey, now: float) -> list[Action]:
        """Resumes a suspended request whose client has read all of its output. Any other request stays unchanged."""
        state = self._requests.get(key)
        if state is None or state.status is not RequestStatus.SUSPENDED:
            return []
        self._placement.go_on(state, now)
        return self._drain(state.model, now)

    def fail(self, key: SequenceKey, error: HoldfastError, now: float) -> list[Action]:
        """Ends a request with an error, after the output that it has. A key that is not open is ignored."""
        state = self._requests.get(key)
        if state is None:
            return []
        return [*self._endings.fail(state, error), *self._drain(state.model, now)]

    # --- events from replicas ---

    def replica_up(self, facts: ReplicaFacts, load: EngineLoad, now: float) -> list[Action]:
        """A link came up. The replica must not be up already."""
        self.registry.add(facts, load, now)
        return [*self.registry.hand_pins_on(), *self._drain(facts.model, now)]

    def replica_retiring(self, replica_id: str, is_retiring: bool, now: float) -> list[Action]:
        """A replica accepts no new requests (or does again). Its requests move to others, as far as those have room."""
        replica = self.registry.get(replica_id)
        if replica is None:
            return []
        pins = self.registry.retire(replica, is_retiring)
        if not is_retiring:
            self._placement.live_moves.note_stay(replica)
        return [*pins, *self._drain(replica.facts.model, now)]

    def replica_down(self, replica_id: str, error: HoldfastError, now: float) -> list[Action]:
        """A link was lost, and with it all attempts on that replica: their requests continue on other replicas."""
        replica = self.registry.remove(replica_id, now)
        if replica is None:
            return []
        self._placement.live_moves.note_stay(replica)
        actions: list[Action] = [*self.registry.hand_pins_on()]
        if not replica.is_retiring:
            self._note_lost(replica)
        for state in self._placement.lose_all(replica, now):
            actions += self._endings.fail(state, _quarantined(state, error), replica_has_it=False)
        return actions + self._drain(replica.facts.model, now)

    def models_removed(self, names: frozenset[str]) -> list[Action]:
        """Sets the models that are removed: waiting requests for them fail, and running ones continue."""
        self.registry.set_removed(names)
        return [action for name in sorted(names) for action in self._fail_removed(name)]

    def models_asleep(self, waits_s: Mapping[str, float]) -> None:
        """Sets the models that may be scaled to zero: a request starts a replica, and waits for at most this number of
        seconds.
        """
        self.registry.set_asleep(waits_s)

    def release_versions(self, model: str) -> None:
        """Lets requests of a model that have output continue at any version, for a caller that updates it in place."""
        for state in self._requests:
            if state.model == model:
                state.bound_version, state.fingerprint = "", without_version(state.fingerprint)

    def set_operator_state(self, operator_state: OperatorState, now: float) -> list[Action]:
        """Applies new operator state: waiting requests of a retired version end, and shares may change."""
        self.registry.set_operator_state(operator_state)
        return [*self._fail_gone(now), *self._placement.drain_all(now)]

    def step(self, replica_id: str, update: StepUpdate, now: float) -> list[Action]:
        """Takes the result of one engine step. Messages of a lost replica or for an old attempt are dropped."""
        replica = self.registry.replicas.get(replica_id)
        if replica is None:
            return []
        if update.fetched_ahead:
            self._placement.live_moves.note_fetched(update.fetched_ahead)
        actions = self._step_outputs.take(replica, update, now)
        return actions + self._drain(replica.facts.model, now)

    # --- time, and the end ---

    def tick(self, now: float) -> list[Action]:
        """Runs all timers that are due: deadlines, outages, circuit breakers, retries. To be called at `next_tick`;
        earlier is harmless.
        """
        actions: list[Action] = []
        while (late := self._requests.deadlines.pop(now)) is not None:
            actions += self._endings.expire(self._requests[late])
        actions += self._fail_late(now)
        for model in self._outages.over(now):
            actions += self._endings.fail_all(list(self._queue.waiting(model)), self._outages.error(model))
        actions += self._fail_gone(now)
        self._placement.refresh(now)
        return actions + self._placement.drain_all(now)

    @property
    def next_tick(self) -> float | None:
        """When `tick` will next have something to do, or None. Where nothing waits, only deadlines are left."""
        if not self._queue.num_waiting:
            return self._requests.deadlines.next
        waits = [*self._outages.ends(), *self._placement.wake_ups(), *self._placement.ends_of_versions()]
        waits += [when for when in (self._requests.deadlines.next, self._queue.next_late) if when is not None]
        return min(waits, default=None)

    def hand_over(self, error: HoldfastError) -> list[Action]:
        """Ends with `error` every open request whose client will resume it at another router."""
        handed_over = [state for state in self._requests if state.client_attempt > 0]
        return self._endings.fail_all(handed_over, error, RequestEvent.HAND_OVER)

    def close_all(self, error: HoldfastError) -> list[Action]:
        """Ends every open request with `error`."""
        return self._endings.fail_all(list(self._requests), error)

    # --- queries ---

    def waiting(self) -> Counter[tuple[str, str, str]]:
        """Requests that wait for a replica, by model, class and tenant."""
        return Counter(
            (state.model, state.request.priority.name.lower(), state.request.tenant)
            for state in self._requests
            if state.status.is_waiting
        )

    @property
    def num_open(self) -> int:
        """Open requests, those in the queue included."""
        return len(self._requests)

    @property
    def num_withdrawn(self) -> int:
        """Attempts that replicas were told to abort and whose ends they have not reported."""
        return self._requests.num_withdrawn

    @property
    def num_queued(self) -> int:
        return self._queue.num_waiting

    @property
    def num_suspended(self) -> int:
        """Open requests whose clients do not read, and which no replica runs for that. Linear in the open requests."""
        return sum(state.status is RequestStatus.SUSPENDED for state in self._requests)

    def is_busy(self, replica_id: str) -> bool:
        """Whether a replica that is up has an attempt of this router."""
        return self.num_attempts(replica_id) > 0

    def is_retiring(self, replica_id: str) -> bool:
        """Whether a replica that is up takes no new requests."""
        replica = self.registry.get(replica_id)
        return replica is not None and replica.is_retiring

    def num_attempts(self, replica_id: str) -> int:
        """Attempts of this router on a replica; 0 if it is not up."""
        replica = self.registry.get(replica_id)
        return 0 if replica is None else len(replica.attempts)

    def model_of(self, replica_id: str) -> str:
        """Model of a replica that is up; else empty."""
        replica = self.registry.get(replica_id)
        return "" if replica is None else replica.facts.model

    def models(self) -> tuple[ModelStatus, ...]:
        """Every model that has been served here, in the order in which they first appeared."""
        return tuple(self.registry.statuses.values())

    def loads(self) -> tuple[ReplicaLoad, ...]:
        """The replicas that are up."""
        return self.registry.loads()

    def demands(self, now: float) -> tuple[ModelDemand, ...]:
        """The load of every model that was served here, for the autoscaler."""
        known = demands(self.models(), self._requests, self.registry, self.stats.first_tokens, now)
        # Of a model at rest that this router has never seen, it cannot even read a prompt: one replica tells it how.
        return (*known, *(ModelDemand(model=name, num_open=1) for name in self.registry.unknown_sleepers()))

    def is_unknown_sleeper(self, model: str) -> bool:
        """Whether it is a model at rest that was never served here."""
        return model in self.registry.unknown_sleepers()

    def version_counts(self) -> tuple[VersionCounts, ...]:
        """Outcomes of requests, by model and version."""
        return tuple(map(replace, self.stats.versions.values()))

    def check_integrity(self) -> None:
        """Asserts that all tables agree: every request is either queued or running on a replica that is up."""
        self.registry.check_integrity()
        self._requests.check_integrity()
        self._placement.check_integrity()

    # --- inside ---

    def _note_lost(self, replica: ReplicaState) -> None:
        counts = self.stats.version(replica.facts.model, replica.version)
        counts.num_lost += 1
        counts.num_failed += len(replica.attempts)

    def _drain(self, model: str, now: float) -> list[Action]:
        """Sends waiting requests of a model while there is room; if the model was removed, they all end."""
        placement = self._placement
        if not self._queue.num_waiting and not self.registry.retiring and not placement.prefilled:
            return []  # as after nearly every step
        drained = placement.drain(model, now)
        return drained + self._fail_removed(model) if self.registry.is_removed(model) else drained

    def _fail_gone(self, now: float) -> list[Action]:
        """Ends requests that wait for a version that no replica will run again."""
        gone = self._placement.bound_in_vain(now)
        return [action for state in gone for action in self._endings.fail(state, _version_gone(state))]

    def _fail_late(self, now: float) -> list[Action]:
        """Ends requests that have waited too long for their first token, unless they wait for a replica to come up."""
        actions, down = list[Action](), {model for model, _ in self.registry.outages()}
        while (late := self._queue.pop_late(now)) is not None:
            if late.model not in down:
                actions += self._endings.fail(late, self._queue.too_late(late))
        return actions

    def _fail_removed(self, model: str) -> list[Action]:
        return self._endings.fail_all(list(self._queue.waiting(model)), self.registry.unknown(model))


def _quarantined(state: RequestState, error: HoldfastError) -> RequestQuarantinedError:
    num_lost, num_tokens = state.num_replicas_lost, len(state.output_token_ids)
    return RequestQuarantinedError(
        f"{num_lost} replicas were lost while they ran this request, which has {num_tokens} output tokens; it is not "
        f"tried again (router.max_replicas_lost). The last one: {error}"
    )


def _version_gone(state: RequestState) -> VersionGoneError:
    reason = f"the cluster was updated, and no replica of it is left to continue {len(state.output_token_ids)} tokens"
    return VersionGoneError(state.model, state.version, reason)

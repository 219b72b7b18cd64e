"""Outages: the time that requests wait for a replica of a model without one, and the error that they get after that.

The wait is the same whether the replicas were lost or the model is scaled to zero, where the first request starts a
replica; only the limits differ.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from holdfast.router.dispatch.admission import AdmissionQueue
from holdfast.router.dispatch.replica_registry import ReplicaRegistry
from holdfast.router.dispatch.replica_state import ReplicaState
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_status import RequestEvent, RequestStatus
from holdfast.worker.errors import ReplicaError
from holdfast.worker.request import NUM_STEPS_TO_CLEAR, PoisonRisk


class Outages:
    """Outages of the models of one router."""

    def __init__(self, registry: ReplicaRegistry, queue: AdmissionQueue, replica_wait_s: float) -> None:
        """`replica_wait_s`: the limit for models that are not at rest."""
        self._registry = registry
        self._queue = queue
        self._replica_wait_s = replica_wait_s

    def admit(self, model: str, now: float) -> None:
        """The first request that waits for a model at rest wakes it: the wait for a replica begins with it.

        Raises `UnknownModelError`, or `ReplicaError` where a new request would wait until its timeout.
        """
        if model in self._registry.asleep and not self._queue.has_any(model):
            self._registry.note_wake(model, now)
        down_since = self._registry.model(model).down_since
        if down_since is not None and now >= down_since + self._limit_s(model):
            raise self.error(model)

    def over(self, now: float) -> Iterator[str]:
        """The models for which nothing waits any longer."""
        for model, down_since in self._registry.outages():
            if now >= down_since + self._limit_s(model):
                yield model

    def ends(self) -> Iterator[float]:
        """The times at which the waiting requests will have waited too long."""
        for model, down_since in self._registry.outages():
            if self._queue.has_any(model):
                yield down_since + self._limit_s(model)

    def error(self, model: str) -> ReplicaError:
        """The error of requests that have waited for the whole outage."""
        cold_start_s = self._registry.asleep.get(model)
        if cold_start_s is None:
            return ReplicaError(f"no replica of model {model!r} is up")
        message = f"none has started within {cold_start_s:g} s (scaling.cold_start_wait_s)"
        return ReplicaError(f"model {model!r} was scaled to zero, and {message}")

    def _limit_s(self, model: str) -> float:
        cold_start_s = self._registry.asleep.get(model)
        return self._replica_wait_s if cold_start_s is None else cold_start_s


LIFETIME_FACTOR: Final = 4
"""A request also fails after this multiple of the limit in total, since some requests crash replicas only late."""


PROOF_S: Final = 0.05
"""A crash sooner than this after a request was sent may have another cause."""


HOST_LOSS_S: Final = 10.0
"""Two crashes on one host within this time may have one cause: a host that is lost takes its replicas one by one, and a
request may have moved from one of them to the next."""


class Quarantine:
    """Counts crashes against requests, and keeps the one trial that each model may have at a time."""

    def __init__(self, max_replicas_lost: int) -> None:
        self._max_lost = max_replicas_lost
        self._on_trial: dict[str, RequestState] = {}

    def culprits(self, lost: Sequence[RequestState], replica: ReplicaState, now: float) -> list[RequestState]:
        """Counts the crash of `replica` against all requests that ran there, and returns the culprits, which must not
        run again.

        If suspects of other routers were there, one of those may be the cause: the crash then convicts none.
        """
        has_foreign_suspects = replica.load.num_foreign_suspects > 0
        proven = [state for state in lost if _is_proof(state, replica, now)]
        for state in lost:
            self._count(state, replica, now)
        suspects = [state for state in lost if state.is_suspect]
        on_trial = [state for state in lost if state.status is RequestStatus.ON_TRIAL]
        if on_trial and not has_foreign_suspects:
            return on_trial
        is_certain = len(suspects) == 1 and not on_trial and not has_foreign_suspects and suspects[0] in proven
        limit = LIFETIME_FACTOR * self._max_lost
        return [state for state in lost if state.num_replicas_lost >= limit or (is_certain and state in suspects)]

    def count_withdrawn(self, states: Sequence[RequestState], replica: ReplicaState, now: float) -> None:
        """Counts a crash against requests that the replica had not yet reported as aborted.

        A request that has since gained output on another replica for `NUM_STEPS_TO_CLEAR` steps is cleared. This crash
        alone convicts none of them: each runs on another replica, or waits.
        """
        for state in states:
            if state.num_steps < NUM_STEPS_TO_CLEAR:
                self._count(state, replica, now)

    def _count(self, state: RequestState, replica: ReplicaState, now: float) -> None:
        state.last_loss = (replica.host, now)
        state.num_replicas_lost += 1
        state.num_replicas_lost_in_a_row += 1
        state.is_suspect = state.num_replicas_lost_in_a_row >= self._max_lost

    def poison_risk(self, state: RequestState) -> PoisonRisk:
        """Poison risk to send with the request to a replica."""
        if state.status is RequestStatus.ON_TRIAL:
            return PoisonRisk.ON_TRIAL
        num_lost = state.num_replicas_lost_in_a_row
        is_next_too_many = num_lost > 0 and num_lost + 1 >= self._max_lost
        return PoisonRisk.SUSPECT if is_next_too_many else PoisonRisk.NONE

    def clear(self, state: RequestState) -> None:
        """An attempt brought output for `NUM_STEPS_TO_CLEAR` steps: its request did not cause the losses before it."""
        state.num_replicas_lost_in_a_row, state.is_suspect = 0, False
        if state.status is RequestStatus.ON_TRIAL:
            state.note(RequestEvent.CLEAR)
        self.end_trial(state)

    def begin_trial(self, state: RequestState) -> None:
        """Lets a held request run alone on its model. The model must be free."""
        assert state.status is RequestStatus.HELD
        assert self.is_free(state.model)
        self._on_trial[state.model] = state

    def end_trial(self, state: RequestState) -> None:
        """Ends the trial of the request, if it is on trial."""
        if self._on_trial.get(state.model) is state:
            del self._on_trial[state.model]

    def is_free(self, model: str) -> bool:
        """Whether the model has no trial under way."""
        return model not in self._on_trial

    def check_integrity(self) -> None:
        """Asserts that every request on trial is a suspect that runs."""
        for model, state in self._on_trial.items():
            assert state.model == model
            assert state.status is RequestStatus.ON_TRIAL
            assert state.is_suspect


def _is_proof(state: RequestState, replica: ReplicaState, now: float) -> bool:
    """Whether the crash of `replica` is evidence against a request that ran there alone as a suspect: its attempt had
    brought output or had the time to begin, and the crash before may not have the same cause.
    """
    assert state.attempt is not None, "it was running"
    has_run = state.num_steps > 0 or now - state.attempt.sent_at >= PROOF_S
    host, lost_at = state.last_loss
    return has_run and not (host == replica.host and now - lost_at < HOST_LOSS_S)

"""Which request killed a replica: so that a poisonous one cannot sweep the cluster, and its neighbours live on.

All that ran on a replica when it died suddenly is under suspicion. Suspicion grows with each death in a row and ends as
soon as the request has got on for some steps elsewhere. That also finds a poison which works late: its next attempt
begins where the last one ended, so it strikes again at once. Once suspicion is full,

    alone in that:   it is the culprit, and is not tried again;
    one of several:  each is put on trial, one at a time and so that the next death tells. Who gets on is cleared.

A death so soon after the request was sent there that it may not have begun to run, as when two replicas die at once, is
no proof: the request is put on trial as well, and only a death in a trial tells, however soon.

Several are also those of other routers. Each router judges its own requests alone, but tells replicas which of them are
suspects, and hears from each how many suspects of others are there (`worker/engine_core/suspects.py`).

What may not live here: queues and actions (`dispatch.py`), what counts as sudden (draining and refusals do not).
"""

from collections.abc import Sequence
from typing import Final

from holdfast.router.dispatch.request_state import RequestEvent, RequestState, RequestStatus
from holdfast.worker.suspicion import NUM_STEPS_TO_CLEAR, Suspicion

LIFETIME_FACTOR: Final = 4
"""A request that has outlived this many times the deaths in a row fails as well: some poisons need a long time."""


PROOF_S: Final = 0.05
"""A replica that dies sooner after a request was sent to it may have had other reasons."""


class Quarantine:
    """Suspicion against requests, and the one trial that each model may have under way."""

    def __init__(self, max_replicas_lost: int) -> None:
        self._max_lost = max_replicas_lost
        self._on_trial: dict[str, RequestState] = {}

    def culprits(self, lost: Sequence[RequestState], now: float, num_foreign_suspects: int = 0) -> list[RequestState]:
        """Judges those that ran on a replica when it died, and counts against all. Culprits must not run again.

        With suspects of other routers there, it may have been one of those: the death makes suspects, and no culprit.
        """
        for state in lost:
            state.num_replicas_lost += 1
            state.num_replicas_lost_in_a_row += 1
        suspects = [state for state in lost if self.is_suspect(state)]
        on_trial = [state for state in lost if state.status is RequestStatus.ON_TRIAL]
        if on_trial and not num_foreign_suspects:
            return on_trial
        is_certain = len(suspects) == 1 and not on_trial and not num_foreign_suspects and _has_run(suspects[0], now)
        limit = LIFETIME_FACTOR * self._max_lost
        return [state for state in lost if state.num_replicas_lost >= limit or (is_certain and state in suspects)]

    def is_suspect(self, state: RequestState) -> bool:
        """Whether it may run on trial only."""
        return state.num_replicas_lost_in_a_row >= self._max_lost

    def suspicion(self, state: RequestState) -> Suspicion:
        """What the replica should know that has just got it."""
        if state.status is RequestStatus.ON_TRIAL:
            return Suspicion.ON_TRIAL
        num_lost = state.num_replicas_lost_in_a_row
        is_next_too_many = num_lost > 0 and num_lost + 1 >= self._max_lost
        return Suspicion.SUSPECT if is_next_too_many else Suspicion.NONE

    def note_step(self, state: RequestState) -> None:
        """An attempt brought output."""
        state.num_steps += 1
        if state.num_steps == NUM_STEPS_TO_CLEAR and state.num_replicas_lost_in_a_row:
            state.num_replicas_lost_in_a_row = 0
            if state.status is RequestStatus.ON_TRIAL:
                state.note(RequestEvent.CLEAR)
            self.end_trial(state)

    def begin_trial(self, state: RequestState) -> None:
        assert state.status is RequestStatus.HELD
        assert self.is_free(state.model)
        self._on_trial[state.model] = state

    def end_trial(self, state: RequestState) -> None:
        """If the request was on trial: it is over, or waits again, or was cleared."""
        if self._on_trial.get(state.model) is state:
            del self._on_trial[state.model]

    def is_free(self, model: str) -> bool:
        """Whether the model has no trial under way."""
        return model not in self._on_trial

    def check_integrity(self) -> None:
        """Asserts that whoever is on trial is a suspect that runs."""
        for model, state in self._on_trial.items():
            assert state.model == model
            assert state.status is RequestStatus.ON_TRIAL
            assert self.is_suspect(state)


def _has_run(state: RequestState, now: float) -> bool:
    """Whether the attempt that has just been lost came to anything, or had the time to."""
    assert state.attempt is not None, "it was running"
    return state.num_steps > 0 or now - state.attempt.sent_at >= PROOF_S

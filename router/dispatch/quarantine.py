"""Quarantine of requests that crash replicas: finds the culprit, so that it cannot take down one replica after another.

Every request that ran on a replica when it crashed counts the loss. The count of losses in a row is reset once the
request has run for some steps elsewhere. A crash that occurs late in an output is found too: the next attempt continues
where the last one ended, so it crashes at once. A request whose count reaches the limit is a suspect. If it was

    the only suspect on the replica:  it is the culprit, and is not tried again;
    one of several:                   they run on trial, one at a time. A crash convicts, some steps of output clear.

A crash so soon after the request was sent that it may not have begun to run, as when two replicas crash together, is no
proof: then the request runs on trial too. A crash during a trial convicts, however soon it comes.

Suspects of other routers count among the several. Each router judges its own requests alone, but tells replicas which
are suspects, and each replica reports how many suspects of other routers it has (`worker/engine_core/suspects.py`).

What may not live here: queues and actions (`placement.py`), what counts as a crash (retirement and refusals do not).
"""

from collections.abc import Sequence
from typing import Final

from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_status import RequestEvent, RequestStatus
from holdfast.worker.suspicion import Suspicion

LIFETIME_FACTOR: Final = 4
"""A request fails as well after this many times the limit in total: some requests crash replicas only after long."""


PROOF_S: Final = 0.05
"""A crash sooner than this after a request was sent may have another cause."""


class Quarantine:
    """Counts crashes against requests, and keeps the one trial that each model may have at a time."""

    def __init__(self, max_replicas_lost: int) -> None:
        self._max_lost = max_replicas_lost
        self._on_trial: dict[str, RequestState] = {}

    def culprits(self, lost: Sequence[RequestState], now: float, num_foreign_suspects: int = 0) -> list[RequestState]:
        """Counts a crash against all requests that ran there, and returns the culprits, which must not run again.

        If suspects of other routers were there, one of those may be the cause: the crash then convicts none.
        """
        for state in lost:
            state.num_replicas_lost += 1
            state.num_replicas_lost_in_a_row += 1
            state.is_suspect = state.num_replicas_lost_in_a_row >= self._max_lost
        suspects = [state for state in lost if state.is_suspect]
        on_trial = [state for state in lost if state.status is RequestStatus.ON_TRIAL]
        if on_trial and not num_foreign_suspects:
            return on_trial
        is_certain = len(suspects) == 1 and not on_trial and not num_foreign_suspects and _has_run(suspects[0], now)
        limit = LIFETIME_FACTOR * self._max_lost
        return [state for state in lost if state.num_replicas_lost >= limit or (is_certain and state in suspects)]

    def suspicion(self, state: RequestState) -> Suspicion:
        """What to tell the replica that gets the request."""
        if state.status is RequestStatus.ON_TRIAL:
            return Suspicion.ON_TRIAL
        num_lost = state.num_replicas_lost_in_a_row
        is_next_too_many = num_lost > 0 and num_lost + 1 >= self._max_lost
        return Suspicion.SUSPECT if is_next_too_many else Suspicion.NONE

    def clear(self, state: RequestState) -> None:
        """An attempt brought output for `NUM_STEPS_TO_CLEAR` steps: its request did not cause the losses before it."""
        state.num_replicas_lost_in_a_row, state.is_suspect = 0, False
        if state.status is RequestStatus.ON_TRIAL:
            state.note(RequestEvent.CLEAR)
        self.end_trial(state)

    def begin_trial(self, state: RequestState) -> None:
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


def _has_run(state: RequestState, now: float) -> bool:
    """Whether the attempt that was just lost brought output, or had the time to begin."""
    assert state.attempt is not None, "it was running"
    return state.num_steps > 0 or now - state.attempt.sent_at >= PROOF_S

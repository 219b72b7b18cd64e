"""How open requests end: finished, failed, handed over or cancelled, each exactly once.

What may live here: an end's actions, and what it leaves in the tables. What may not: when a request is to end
(`dispatch.py`, `progress.py`).
"""

import logging
from typing import Final

from holdfast.router.dispatch.placement import Placement
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_status import RequestEvent, RequestStatus
from holdfast.router.dispatch.request_table import RequestTable
from holdfast.router.events import Action, Fail, SendAbort
from holdfast.worker.errors import (
    CallerError,
    DeadlineExceededError,
    Fault,
    HoldfastError,
    InternalError,
    RequestAbortedError,
)

logger = logging.getLogger(__name__)

_OF_SERVERS: Final = {Fault.REPLICA, Fault.BUG}

_LEAVING: Final = {RequestEvent.CANCEL, RequestEvent.HAND_OVER}
"""Ends by which a client asks for nothing more here."""


class Endings:
    """Ends requests of one router's tables."""

    def __init__(self, requests: RequestTable, placement: Placement) -> None:
        self._requests = requests
        self._placement = placement
        self._queue = placement.queue
        self._stats = placement.stats

    def fail(
        self,
        state: RequestState,
        error: HoldfastError,
        event: RequestEvent = RequestEvent.FAIL,
        *,
        replica_has_it: bool = True,
    ) -> list[Action]:
        """Ends one with an error, which its client is told."""
        is_told = event is RequestEvent.FAIL and state.attempt is not None
        if is_told and (error.fault in _OF_SERVERS or isinstance(error, DeadlineExceededError)):
            assert state.attempt is not None
            self._stats.version(state.model, state.attempt.replica.version).num_failed += 1
        has_left = isinstance(error, CallerError | RequestAbortedError)
        closing = self.close(state, event, replica_has_it=replica_has_it, has_left=has_left)
        return [Fail(key=state.key, error=error), *closing]

    def fail_all(
        self, states: list[RequestState], error: HoldfastError, event: RequestEvent = RequestEvent.FAIL
    ) -> list[Action]:
        """Ends each of them with the same error."""
        return [action for state in states for action in self.fail(state, error, event)]

    def expire(self, state: RequestState) -> list[Action]:
        """Ends one whose deadline has passed."""
        doing = "waited for a replica" if state.status.is_waiting else "ran"
        doing = "waited for its client to read" if state.status is RequestStatus.SUSPENDED else doing
        num_tokens = len(state.output_token_ids)
        error = DeadlineExceededError(f"time was up while the request {doing}, after {num_tokens} output tokens")
        return self.fail(state, error)

    def fail_unreadable(self, state: RequestState, bug: Exception, *, replica_has_it: bool) -> list[Action]:
        """Ends one whose tokens a bug of ours has kept from becoming text; the others of its link go on."""
        logger.error(
            "request %s: its tokens could not be turned into text",
            state.request_id,
            exc_info=bug,
            extra={"details": {"request_id": state.request_id, "model": state.model}},
        )
        error = InternalError(f"the output could not be turned into text: {type(bug).__name__}")
        return self.fail(state, error, replica_has_it=replica_has_it)

    def close(
        self, state: RequestState, event: RequestEvent, *, replica_has_it: bool = True, has_left: bool = False
    ) -> list[Action]:
        """Removes a request. Its replica gets an abort if it may still run the attempt.

        `has_left`: it is an end by which its client waits for no token here; cancelled and handed over ones always are.
        What failed for its deadline, or for want of room, stays demand that was not met.
        """
        actions: list[Action] = []
        if not state.has_first_token and (has_left or event in _LEAVING):
            self._stats.first_tokens[state.model].num_left += 1
        if state.attempt is not None:
            attempt = self._requests.end_attempt(state)
            if event is RequestEvent.FINISH:
                self._stats.version(state.model, attempt.replica.version).num_finished += 1
            if replica_has_it:
                actions.append(SendAbort(replica_id=attempt.replica.facts.replica_id, attempt=attempt.number))
            if state.status is RequestStatus.ON_TRIAL:
                self._placement.quarantine.end_trial(state)
        elif state.status is not RequestStatus.SUSPENDED:
            self._queue.remove(state)
        state.note(event)
        self._requests.remove(state)
        return actions

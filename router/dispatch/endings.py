"""Outputs of steps for open requests, and their ends: finished, failed, handed over or cancelled, each exactly once."""

import logging
from typing import Final

from holdfast.router.dispatch.placement import Placement
from holdfast.router.dispatch.replica_state import ReplicaState
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
    ReplicaError,
    RequestAbortedError,
)
from holdfast.worker.request import NUM_STEPS_TO_CLEAR, FinishReason, TokenDelta
from holdfast.worker.step_update import StepUpdate

logger = logging.getLogger(__name__)

_OF_SERVERS: Final = {Fault.REPLICA, Fault.BUG}

STOPPED_RETRY_S: Final = 1.0

_LEAVING: Final = {RequestEvent.CANCEL, RequestEvent.HAND_OVER}
"""Ends after which the client expects nothing more from this router."""


def stopping() -> RequestAbortedError:
    """The error for requests to a router that stops. Clients may retry: another router may have its address by then."""
    error = RequestAbortedError("this router is stopping")
    error.retry_after_s = STOPPED_RETRY_S
    return error


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
        """Ends one with an error, which its client gets."""
        is_submitted = event is RequestEvent.FAIL and state.attempt is not None
        if is_submitted and (error.fault in _OF_SERVERS or isinstance(error, DeadlineExceededError)):
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
        """Ends a request whose deadline has passed."""
        doing = "waited for a replica" if state.status.is_waiting else "ran"
        doing = "waited for its client to read" if state.status is RequestStatus.SUSPENDED else doing
        num_tokens = len(state.output_token_ids)
        error = DeadlineExceededError(f"time was up while the request {doing}, after {num_tokens} output tokens")
        return self.fail(state, error)

    def fail_unreadable(self, state: RequestState, bug: Exception, *, replica_has_it: bool) -> list[Action]:
        """Ends a request whose tokens could not be turned into text because of a bug; the others of its link
        continue.
        """
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


class StepOutputs:
    """Hands the outputs of steps to the requests that they belong to."""

    def __init__(self, requests: RequestTable, placement: Placement, endings: Endings) -> None:
        self._requests = requests
        self._placement = placement
        self._endings = endings

    def take(self, replica: ReplicaState, update: StepUpdate, now: float) -> list[Action]:
        """Output and ends of one step for clients. Output of an old attempt is dropped."""
        replica.note_report(update.load)
        if update.stats is not None or update.cache.stored or update.cache.evicted:
            replica.note_memory(update)
        actions: list[Action] = []
        running, attempts = self._requests.by_attempt.get, replica.attempts
        for attempt, index, token_id in zip(*update.plain, strict=True):
            state = running(attempt) if attempt in attempts else None
            if state is None:
                continue
            if state.num_steps == NUM_STEPS_TO_CLEAR and index == len(state.output_token_ids):
                try:  # as nearly all go on, which is `_advance`, cut short
                    output_delta = state.take_one(token_id)
                except Exception as bug:  # noqa: BLE001 - a bug ends its request alone, which is logged and answered
                    actions += self._endings.fail_unreadable(state, bug, replica_has_it=True)
                    continue
                state.tenant.counter += state.tenant.output_token_cost
                actions.append(output_delta)
                if output_delta.finish_reason is not None:
                    actions[-1] = state.with_figures(output_delta, now)
                    actions += self._endings.close(state, RequestEvent.FINISH)
            else:
                delta = TokenDelta(attempt=attempt, first_token_index=index, token_ids=(token_id,))
                actions += self._advance(state, delta, now)
        for delta in update.deltas:
            state = self._requests.running(replica, delta.attempt)
            if state is not None:
                actions += self._advance(state, delta, now)
            elif delta.finish_reason is not None:
                self._requests.note_end(delta.attempt)
        for rejection in update.rejections:
            state = self._requests.running(replica, rejection.attempt)
            if state is not None:
                actions += self._refuse(state, rejection.error, now)
            else:
                self._requests.note_end(rejection.attempt)
        return actions

    def _advance(self, state: RequestState, delta: TokenDelta, now: float) -> list[Action]:
        """Takes one delta. A bug in Holdfast ends this request alone, not the others of the link."""
        replica_has_it = delta.finish_reason is None
        num_seen = len(state.output_token_ids) - delta.first_token_index
        if num_seen < 0:
            gap = f"{-num_seen} output tokens are missing before token {delta.first_token_index}"
            return self._endings.fail(state, InternalError(gap), replica_has_it=replica_has_it)
        if delta.prompt_logprobs and not delta.token_ids and delta.finish_reason is None:
            state.note_prompt_logprobs(delta.prompt_logprobs)
            return []
        if delta.finish_reason is FinishReason.ABORT:
            return self._refuse(state, ReplicaError("the replica aborted the request"), now)
        if not state.output_token_ids:
            state.num_cached_tokens = state.timeline.num_cached_tokens = delta.num_cached_tokens
            state.timeline.num_disk_tokens = delta.num_disk_tokens
        if delta.num_draft_tokens:
            times = state.timeline.attempts[-1]
            times.num_draft_tokens, times.num_accepted_tokens = delta.num_draft_tokens, delta.num_accepted_tokens
        try:
            token_ids, logprobs = delta.token_ids[num_seen:], delta.logprobs[num_seen:]
            output_delta = state.take(token_ids, delta.finish_reason, logprobs, delta.prompt_logprobs)
            if delta.pooled and output_delta is not None:
                output_delta = output_delta._replace(pooled=delta.pooled)
        except Exception as bug:  # noqa: BLE001 - as in `take`
            return self._endings.fail_unreadable(state, bug, replica_has_it=replica_has_it)
        if output_delta is None:
            return []
        self._placement.note_step(state, len(output_delta.token_ids), now, delta.queued_s)
        if output_delta.finish_reason is None:
            return [output_delta]
        output_delta = state.with_figures(output_delta, now)
        return [output_delta, *self._endings.close(state, RequestEvent.FINISH, replica_has_it=replica_has_it)]

    def _refuse(self, state: RequestState, error: HoldfastError, now: float) -> list[Action]:
        """A replica that is up refused an attempt or gave it up. The request is retried elsewhere if that may help."""
        attempt = state.attempt
        is_taken_back = self._placement.take_back(state, error, now)
        if is_taken_back and attempt is not None and error.fault is Fault.REPLICA:
            self._placement.stats.version(state.model, attempt.replica.version).num_failed += 1
        return [] if is_taken_back else self._endings.fail(state, error, replica_has_it=False)

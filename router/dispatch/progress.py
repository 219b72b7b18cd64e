"""Progress of running requests: what an engine step of a replica has brought each of them.

What may live here: tokens by their index, first tokens, refusals. What may not: how a request ends (`endings.py`), what
takes the room that an end leaves (`dispatch.py`).
"""

from holdfast.router.dispatch.endings import Endings
from holdfast.router.dispatch.placement import Placement
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_status import RequestEvent
from holdfast.router.dispatch.request_table import RequestTable
from holdfast.router.events import Action
from holdfast.router.replicas.replica_state import ReplicaState
from holdfast.worker.errors import Fault, HoldfastError, InternalError, ReplicaError
from holdfast.worker.request import FinishReason, TokenDelta
from holdfast.worker.step_update import StepUpdate
from holdfast.worker.suspicion import NUM_STEPS_TO_CLEAR


class Progress:
    """Of one router's requests."""

    def __init__(self, requests: RequestTable, placement: Placement, endings: Endings) -> None:
        self._requests = requests
        self._placement = placement
        self._endings = endings

    def take(self, replica: ReplicaState, update: StepUpdate, now: float) -> list[Action]:
        """What clients get of one step, and what ends with it. What comes for an old attempt is dropped."""
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
                    delivery = state.take_one(token_id)
                except Exception as bug:
                    actions += self._endings.fail_unreadable(state, bug, replica_has_it=True)
                    continue
                state.tenant.counter += state.tenant.output_token_cost
                actions.append(delivery)
                if delivery.finish_reason is not None:
                    actions += self._endings.close(state, RequestEvent.FINISH)
            else:
                delta = TokenDelta(attempt=attempt, first_token_index=index, token_ids=(token_id,))
                actions += self._advance(state, delta, now)
        for delta in update.deltas:
            state = self._requests.running(replica, delta.attempt)
            if state is not None:
                actions += self._advance(state, delta, now)
        for rejection in update.rejections:
            state = self._requests.running(replica, rejection.attempt)
            if state is not None:
                actions += self._refuse(state, rejection.error, now)
        return actions

    def _advance(self, state: RequestState, delta: TokenDelta, now: float) -> list[Action]:
        """Takes one delta. A bug of ours ends this request alone, not the others of the link."""
        replica_has_it = delta.finish_reason is None
        num_seen = len(state.output_token_ids) - delta.first_token_index
        if num_seen < 0:
            gap = f"{-num_seen} output tokens are missing before token {delta.first_token_index}"
            return self._endings.fail(state, InternalError(gap), replica_has_it=replica_has_it)
        if delta.prompt_logprobs and not delta.token_ids and delta.finish_reason is None:
            state.note_prompt_logprobs(delta.prompt_logprobs)
            return []
        if delta.finish_reason is FinishReason.ABORT:
            return self._refuse(state, ReplicaError("the replica gave the request up"), now)
        if not state.output_token_ids:
            state.num_cached_tokens = delta.num_cached_tokens
        try:
            token_ids, logprobs = delta.token_ids[num_seen:], delta.logprobs[num_seen:]
            delivery = state.take(token_ids, delta.finish_reason, logprobs, delta.prompt_logprobs)
        except Exception as bug:
            return self._endings.fail_unreadable(state, bug, replica_has_it=replica_has_it)
        if delivery is None:
            return []
        self._placement.note_step(state, len(delivery.token_ids), now, delta.queued_s)
        if delivery.finish_reason is None:
            return [delivery]
        return [delivery, *self._endings.close(state, RequestEvent.FINISH, replica_has_it=replica_has_it)]

    def _refuse(self, state: RequestState, error: HoldfastError, now: float) -> list[Action]:
        """A replica that is up refused an attempt or gave it up. The request is retried elsewhere if that may help."""
        attempt = state.attempt
        is_taken_back = self._placement.take_back(state, error, now)
        if is_taken_back and attempt is not None and error.fault is Fault.REPLICA:
            self._placement.stats.version(state.model, attempt.replica.version).num_failed += 1
        return [] if is_taken_back else self._endings.fail(state, error, replica_has_it=False)

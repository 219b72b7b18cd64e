"""The table of open requests: one state each, found by request id and by attempt, and their deadlines.

What may live here: the books. What may not: what a request is (`request_state.py`), decisions (`dispatch.py`).
"""

from collections.abc import Hashable, Iterator

from holdfast.router.dispatch.request_state import Attempt, RequestEvent, RequestState, RequestStatus
from holdfast.router.replicas.replica_registry import ReplicaState
from holdfast.worker.service_order.timers import Timers


class RequestTable:
    """The states, by request id and by attempt, and their deadlines."""

    def __init__(self) -> None:
        self.deadlines = Timers[str]()
        self._states: dict[str, RequestState] = {}
        self._by_attempt: dict[Hashable, RequestState] = {}
        self._last_attempt = 0

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def __getitem__(self, request_id: str) -> RequestState:
        return self._states[request_id]

    def get(self, request_id: str) -> RequestState | None:
        return self._states.get(request_id)

    def add(self, state: RequestState, deadline: float) -> None:
        assert state.request_id not in self._states, f"{state.request_id} is open already"
        self._states[state.request_id] = state
        self.deadlines.set(state.request_id, deadline)

    def remove(self, state: RequestState) -> None:
        assert state.attempt is None, "an attempt ends before its request does"
        del self._states[state.request_id]
        self.deadlines.drop(state.request_id)

    def begin_attempt(self, state: RequestState, replica: ReplicaState, now: float) -> Attempt:
        """It is in the queue no more, or leaves another replica for this one."""
        assert state.attempt is None, "a request runs in one place at a time"
        is_first = state.status is RequestStatus.QUEUED
        state.note(RequestEvent.SEND if state.status.is_waiting else RequestEvent.MOVE)
        self._last_attempt += 1
        state.attempt = Attempt(number=self._last_attempt, replica=replica, sent_at=now)
        state.num_steps = 0
        state.note_replica(replica.facts)
        self._by_attempt[self._last_attempt] = state
        num_tokens = len(state.request.prompt_token_ids) + len(state.output_token_ids)
        num_uncached_tokens = num_tokens - replica.cached.num_cached_tokens(state.prefix)
        replica.note_sent(self._last_attempt, num_uncached_tokens)
        if is_first:  # what has to be computed again is not the tenant's fault
            state.tenant.charge(num_uncached_tokens, 0)
        return state.attempt

    def end_attempt(self, state: RequestState) -> Attempt:
        """From here on, whatever a replica says of the attempt is not found any more."""
        attempt = state.attempt
        assert attempt is not None, "only an attempt that runs can end"
        state.attempt = None
        del self._by_attempt[attempt.number]
        attempt.replica.attempts.remove(attempt.number)
        return attempt

    def running(self, replica: ReplicaState, attempt: Hashable) -> RequestState | None:
        """The request that an attempt is for, unless the attempt has ended, or is another replica's."""
        return self._by_attempt.get(attempt) if attempt in replica.attempts else None

    def on(self, replica: ReplicaState) -> list[RequestState]:
        """The requests that run on a replica, first sent first."""
        return [self._by_attempt[attempt] for attempt in sorted(replica.attempts)]

    def check_integrity(self) -> None:
        """Asserts that the books agree with the states."""
        assert len(self.deadlines) == len(self._states)
        for state in self._states.values():
            assert state.status.is_waiting or state.status.has_attempt, f"{state.request_id} is over and open"
            assert state.status.has_attempt == (state.attempt is not None), f"{state.request_id}: {state.status}"
        running = {key: state.attempt for key, state in self._states.items() if state.attempt is not None}
        assert len(running) == len(self._by_attempt)
        for request_id, attempt in running.items():
            assert request_id in self.deadlines
            assert self._by_attempt[attempt.number] is self._states[request_id]
            assert attempt.number in attempt.replica.attempts

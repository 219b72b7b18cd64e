"""Table of open requests: their states by sequence, by request and by attempt, and their deadlines."""

from collections import Counter
from collections.abc import Hashable, Iterator

from holdfast.router.dispatch.replica_state import ReplicaState
from holdfast.router.dispatch.request_state import Attempt, RequestState
from holdfast.router.dispatch.request_status import RequestEvent, RequestStatus
from holdfast.worker.request import RequestKey, SequenceKey
from holdfast.worker.timers import Timers


class _Group:
    """The open siblings of one request. They all run on one version: their client sees one answer."""

    def __init__(self) -> None:
        self.open: dict[RequestState, None] = {}
        self._ended = ""
        """The version of an ended request with output."""

    def remove(self, state: RequestState) -> None:
        del self.open[state]
        self._ended = self._ended or state.version

    @property
    def version(self) -> str:
        """Version of the output, or else of an attempt that may bring some."""
        with_output = self._ended or next((state.version for state in self.open if state.version), "")
        running = (state.attempt.replica.version for state in self.open if state.attempt is not None)
        return with_output or next(running, "")


class RequestTable:
    """The states of all open requests, by key and by attempt, and their deadlines."""

    def __init__(self) -> None:
        self.deadlines = Timers[SequenceKey]()
        self._states: dict[SequenceKey, RequestState] = {}
        self.by_request: dict[RequestKey, dict[RequestState, None]] = {}
        """The open sequences of each client's request. To be read only."""
        self.by_attempt: dict[Hashable, RequestState] = {}
        """Requests that run. Read-only; `running` says which of them run on a replica."""
        self._withdrawn: dict[Hashable, tuple[ReplicaState, RequestState]] = {}
        """Attempts that a replica was told to abort because their requests continue elsewhere, until it reports their
        ends: a step that it runs meanwhile may still crash it.
        """
        self._last_attempt = 0
        self._siblings = Counter[tuple[Hashable, str]]()
        """Attempts of each group of siblings on each replica."""
        self._groups: dict[Hashable, _Group] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._states

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def __getitem__(self, key: SequenceKey) -> RequestState:
        return self._states[key]

    def get(self, key: SequenceKey) -> RequestState | None:
        return self._states.get(key)

    def of_request(self, key: RequestKey) -> list[RequestState]:
        """The open sequences of a client's request, in the order in which they were opened."""
        return list(self.by_request.get(key, ()))

    def add(self, state: RequestState) -> None:
        assert state.key not in self._states, f"{state.key} is open already"
        self._states[state.key] = state
        self.by_request.setdefault(state.request_key, {})[state] = None
        self.deadlines.set(state.key, state.deadline)
        if state.request.group_id:
            self._groups.setdefault(state.request.group_id, _Group()).open[state] = None

    def remove(self, state: RequestState) -> None:
        """Removes a request that has ended."""
        assert state.attempt is None, "an attempt ends before its request does"
        del self._states[state.key]
        del self.by_request[state.request_key][state]
        if not self.by_request[state.request_key]:
            del self.by_request[state.request_key]
        self.deadlines.drop(state.key)
        if state.request.group_id:
            self._groups[state.request.group_id].remove(state)
            if not self._groups[state.request.group_id].open:
                del self._groups[state.request.group_id]

    def version_of_group(self, group_id: Hashable) -> str:
        """The version that siblings of a group run on, or have run on; empty if none has run."""
        group = self._groups.get(group_id)
        return "" if group is None else group.version

    def begin_attempt(self, state: RequestState, replica: ReplicaState, event: RequestEvent, now: float) -> Attempt:
        """Binds a request that has left the queue (SEND) or another replica (MOVE) to one, under a new number."""
        assert state.attempt is None, "a request runs in one place at a time"
        is_first = state.status is RequestStatus.QUEUED
        state.note(event)
        self._last_attempt += 1
        state.attempt = Attempt(number=self._last_attempt, replica=replica, sent_at=now)
        state.num_steps = 0
        state.early_prompt_logprobs.clear()
        state.note_replica(replica)
        self.by_attempt[self._last_attempt] = state
        num_new_tokens = self._num_new_tokens(state, replica)
        replica.note_sent(self._last_attempt, num_new_tokens)
        if is_first:  # a tenant is not charged for recomputation after a failover
            state.tenant.charge(num_new_tokens, 0)
        if state.request.group_id:
            self._count_sibling(state, replica, 1)
        return state.attempt

    def end_attempt(self, state: RequestState) -> Attempt:
        """Unbinds a request from its replica. Later messages about the attempt find no request."""
        attempt = state.attempt
        assert attempt is not None, "only an attempt that runs can end"
        state.attempt = None
        del self.by_attempt[attempt.number]
        attempt.replica.note_end(attempt.number)
        if state.request.group_id:
            self._count_sibling(state, attempt.replica, -1)
        return attempt

    def withdraw_attempt(self, state: RequestState) -> Attempt:
        """`end_attempt` for a request that continues elsewhere while its replica still has to take the abort."""
        attempt = self.end_attempt(state)
        self._withdrawn[attempt.number] = attempt.replica, state
        return attempt

    def note_end(self, attempt: Hashable) -> None:
        """A replica has reported the end of an attempt: the attempt cannot crash the replica any longer."""
        self._withdrawn.pop(attempt, None)

    @property
    def num_withdrawn(self) -> int:
        """Withdrawn attempts whose ends no replica has reported."""
        return len(self._withdrawn)

    def pop_withdrawn(self, replica: ReplicaState) -> list[RequestState]:
        """The open requests whose withdrawn attempts a lost replica may have been running."""
        numbers = [number for number, (home, _) in self._withdrawn.items() if home is replica]
        states = [self._withdrawn.pop(number)[1] for number in numbers]
        return [state for state in states if self._states.get(state.key) is state]

    def running(self, replica: ReplicaState, attempt: Hashable) -> RequestState | None:
        """The request that an attempt is for, unless the attempt has ended, or is another replica's."""
        return self.by_attempt.get(attempt) if attempt in replica.attempts else None

    def on(self, replica: ReplicaState) -> list[RequestState]:
        """The requests that run on a replica, in the order in which they were sent."""
        return [self.by_attempt[attempt] for attempt in sorted(replica.attempts)]

    def check_integrity(self) -> None:
        """Asserts that the indices agree with the states."""
        assert len(self.deadlines) == len(self._states)
        for state in self._states.values():
            is_suspended = state.status is RequestStatus.SUSPENDED
            assert state.status.is_waiting or state.status.has_attempt or is_suspended, f"{state.request_id} is over"
            assert state.status.has_attempt == (state.attempt is not None), f"{state.request_id}: {state.status}"
        assert sum(map(len, self.by_request.values())) == len(self._states)
        assert not self._withdrawn.keys() & self.by_attempt.keys(), "a withdrawn attempt runs"
        running = {key: state.attempt for key, state in self._states.items() if state.attempt is not None}
        assert len(running) == len(self.by_attempt)
        for sequence, attempt in running.items():
            assert sequence in self.deadlines
            assert self.by_attempt[attempt.number] is self._states[sequence]
            assert attempt.number in attempt.replica.attempts
        in_groups = [state for state in self.by_attempt.values() if state.request.group_id]
        assert self._siblings.total() == len(in_groups), f"{len(in_groups)} siblings have attempts: {self._siblings}"

    # --- inside ---

    def _num_new_tokens(self, state: RequestState, replica: ReplicaState) -> int:
        """The tokens that a replica has to compute before the next one: siblings there share one computed prompt."""
        num_prompt_tokens = len(state.request.prompt_token_ids)
        has_sibling = (state.request.group_id, replica.facts.replica_id) in self._siblings
        num_shared = num_prompt_tokens if has_sibling else 0
        if not has_sibling and replica.cached.blocks:
            num_shared = replica.cached.num_cached_tokens(state.prefix)
        return num_prompt_tokens + len(state.output_token_ids) - num_shared

    def _count_sibling(self, state: RequestState, replica: ReplicaState, change: int) -> None:
        key = (state.request.group_id, replica.facts.replica_id)
        self._siblings[key] += change
        if not self._siblings[key]:
            del self._siblings[key]

"""The table of open requests: one state each, found by request id and by attempt, and their deadlines.

What may live here: the books. What may not: what a request is (`request_state.py`), decisions (`dispatch.py`).
"""

from collections.abc import Hashable, Iterator

from holdfast.router.dispatch.request_state import Attempt, RequestEvent, RequestState, RequestStatus
from holdfast.router.replicas.replica_registry import ReplicaState
from holdfast.worker.service_order.timers import Timers


class RequestTable:
    """The records, by request id and by attempt, and their deadlines."""

    def __init__(self) -> None:
        self.deadlines = Timers[str]()
        self._records: dict[str, RequestState] = {}
        self._by_attempt: dict[Hashable, RequestState] = {}
        self._last_attempt = 0

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._records

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._records.values())

    def __getitem__(self, request_id: str) -> RequestState:
        return self._records[request_id]

    def get(self, request_id: str) -> RequestState | None:
        return self._records.get(request_id)

    def add(self, record: RequestState, deadline: float) -> None:
        assert record.request_id not in self._records, f"{record.request_id} is open already"
        self._records[record.request_id] = record
        self.deadlines.set(record.request_id, deadline)

    def remove(self, record: RequestState) -> None:
        assert record.attempt is None, "an attempt ends before its request does"
        del self._records[record.request_id]
        self.deadlines.drop(record.request_id)

    def begin_attempt(self, record: RequestState, replica: ReplicaState, now: float) -> Attempt:
        """It is in the queue no more, or leaves another replica for this one."""
        assert record.attempt is None, "a request runs in one place at a time"
        is_first = record.status is RequestStatus.QUEUED
        record.note(RequestEvent.SEND if record.status.is_waiting else RequestEvent.MOVE)
        self._last_attempt += 1
        record.attempt = Attempt(number=self._last_attempt, replica=replica, sent_at=now)
        record.num_steps = 0
        record.note_replica(replica.facts)
        self._by_attempt[self._last_attempt] = record
        num_tokens = len(record.request.prompt_token_ids) + len(record.output_token_ids)
        num_uncached_tokens = num_tokens - replica.cached.num_cached_tokens(record.prefix)
        replica.note_sent(self._last_attempt, num_uncached_tokens)
        if is_first:  # what has to be computed again is not the tenant's fault
            record.tenant.charge(num_uncached_tokens, 0)
        return record.attempt

    def end_attempt(self, record: RequestState) -> Attempt:
        """From here on, whatever a replica says of the attempt is not found any more."""
        attempt = record.attempt
        assert attempt is not None, "only an attempt that runs can end"
        record.attempt = None
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
        """Asserts that the books agree with the records."""
        assert len(self.deadlines) == len(self._records)
        for record in self._records.values():
            assert record.status.is_waiting or record.status.has_attempt, f"{record.request_id} is over and open"
            assert record.status.has_attempt == (record.attempt is not None), f"{record.request_id}: {record.status}"
        running = {key: record.attempt for key, record in self._records.items() if record.attempt is not None}
        assert len(running) == len(self._by_attempt)
        for request_id, attempt in running.items():
            assert request_id in self.deadlines
            assert self._by_attempt[attempt.number] is self._records[request_id]
            assert attempt.number in attempt.replica.attempts

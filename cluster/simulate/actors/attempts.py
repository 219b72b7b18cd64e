"""Attempt ledger of a simulated router: which attempts it has running, by its messages alone.

It is kept beside the dispatch core, to detect that the core has lost sight of an attempt: one that nobody waits for
holds blocks until it has run to its end. What may not live here: the core's own records.
"""

from collections.abc import Hashable, Iterable

from holdfast.cluster.simulate.kernel.promises import require
from holdfast.router.events import SendAbort, SendSubmit
from holdfast.worker.step_update import StepUpdate


class AttemptBooks:
    """The attempts that replicas run for one router."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._running: dict[str, SendSubmit] = {}
        self._request_ids: dict[Hashable, str] = {}

    def note_submit(self, submit: SendSubmit) -> None:
        """Checks that a request runs in one place at a time."""
        request_id = submit.request.request_id
        before = self._running.get(request_id)
        if before is not None:
            where = f"attempt {before.attempt} at {before.replica_id}"
            require(False, f"{self._owner}: {request_id} is sent to {submit.replica_id}, and {where} goes on")
        self._running[request_id] = submit
        self._request_ids[submit.attempt] = request_id

    def note_abort(self, abort: SendAbort) -> None:
        self._end(abort.attempt)

    def note_update(self, update: StepUpdate) -> None:
        """Ends the attempts that the replica has finished or rejected."""
        for delta in update.deltas:
            if delta.finish_reason is not None:
                self._end(delta.attempt)
        for rejection in update.rejections:
            self._end(rejection.attempt)

    def note_lost(self, replica_id: str) -> None:
        for submit in [submit for submit in self._running.values() if submit.replica_id == replica_id]:
            self._end(submit.attempt)

    def check_over(self, request_ids: Iterable[str]) -> None:
        """Checks that requests that are over run nowhere."""
        for request_id in request_ids:
            submit = self._running.get(request_id)
            if submit is not None:
                require(False, f"{self._owner}: {request_id} is over, and goes on at {submit.replica_id}")

    def _end(self, attempt: Hashable) -> None:
        request_id = self._request_ids.pop(attempt, None)
        if request_id is not None:
            del self._running[request_id]

"""Attempt ledger of a simulated router: which attempts it has running, by its messages alone.

It is kept beside the dispatch core, to detect that the core has lost sight of an attempt: one that nobody waits for
holds blocks until it has run to its end. What may not live here: the core's own records.
"""

from collections.abc import Hashable, Iterable

from holdfast.cluster.simulate.kernel.promises import require
from holdfast.router.events import SendAbort, SendSubmit
from holdfast.worker.request import SequenceKey
from holdfast.worker.step_update import StepUpdate


class AttemptBooks:
    """The attempts that replicas run for one router."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._running: dict[SequenceKey, SendSubmit] = {}
        self._keys: dict[Hashable, SequenceKey] = {}

    def note_submit(self, submit: SendSubmit) -> None:
        """Checks that a request runs in one place at a time."""
        key = submit.request.sequence_key
        before = self._running.get(key)
        if before is not None:
            where = f"attempt {before.attempt} at {before.replica_id}"
            require(False, f"{self._owner}: {key} is sent to {submit.replica_id}, and {where} goes on")
        self._running[key] = submit
        self._keys[submit.attempt] = key

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

    def check_over(self, keys: Iterable[SequenceKey]) -> None:
        """Checks that sequences that are over run nowhere."""
        for key in keys:
            submit = self._running.get(key)
            if submit is not None:
                require(False, f"{self._owner}: {key} is over, and goes on at {submit.replica_id}")

    def _end(self, attempt: Hashable) -> None:
        key = self._keys.pop(attempt, None)
        if key is not None:
            del self._running[key]

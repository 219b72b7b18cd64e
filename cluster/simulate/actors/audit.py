"""Audited dispatch host: the real one, whose every action is entered in an attempt ledger and needs a reason."""

import sys
from collections.abc import Hashable, Iterable

from holdfast.cluster.simulate.kernel.process import SettableClock
from holdfast.cluster.simulate.kernel.timeline import Violation, require
from holdfast.router.config import RouterConfig
from holdfast.router.dispatch.dispatch import Dispatch
from holdfast.router.dispatch.dispatch_host import FINEST_S, DispatchHost
from holdfast.router.events import Action, Fail, SendAbort, SendSubmit
from holdfast.router.generation import OutputDelta
from holdfast.worker.errors import (
    HoldfastError,
    QueueFullError,
    ReplicaError,
    RequestQuarantinedError,
    VersionGoneError,
)
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


class AuditedDispatchHost(DispatchHost):
    """A dispatch host that raises `Violation` at the action that breaks an invariant."""

    def __init__(self, owner: object, dispatch: Dispatch, clock: SettableClock, config: RouterConfig) -> None:
        super().__init__(dispatch, clock, on_models_changed=lambda: None)
        self._owner = owner
        self._alarms = clock
        self._config = config
        self._books = AttemptBooks(owner)
        self.num_replicas_lost = 0

    def replica_update(self, replica_id: str, update: StepUpdate) -> None:
        """Books a replica's update before the dispatcher has it."""
        self._books.note_update(update)
        super().replica_update(replica_id, update)

    def replica_down(self, replica_id: str, error: HoldfastError) -> None:
        """Books a replica's loss before the dispatcher has it."""
        self.num_replicas_lost += 1
        self._books.note_lost(replica_id)
        super().replica_down(replica_id, error)

    def perform(self, actions: list[Action]) -> None:
        over = []
        for action in actions:
            match action:
                case OutputDelta():
                    if action.finish_reason is not None:
                        over.append(action.key)
                case SendSubmit():
                    self._books.note_submit(action)
                case SendAbort():
                    self._books.note_abort(action)
                case Fail():
                    self._check_excuse(action)
                    over.append(action.key)
        self._books.check_over(over)
        super().perform(actions)
        num_streams = len(self._streams)
        if num_streams != self.dispatch.num_open:
            raise Violation(f"{self._owner}: {self.dispatch.num_open} open requests for {num_streams} streams")
        self._check_alarm()

    def close_all(self, error: HoldfastError) -> None:
        """Called only when the router has failed on an exception, which is a violation."""
        raise Violation(f"{self._owner}: {error}: {sys.exception()!r}")

    def _tick(self) -> None:
        super()._tick()
        self._check_alarm()

    def _check_alarm(self) -> None:
        """Checks that an alarm is set for the next change that time alone brings."""
        due = self.dispatch.next_tick
        if due is not None and not self._alarms.rings_by(max(due, self.now() + FINEST_S)):
            raise Violation(f"{self._owner}: something is due at {due}, and no alarm is set for it")

    def _check_excuse(self, failure: Fail) -> None:
        """Checks that the router gave up only for lack of replicas, or after several had died under the request."""
        match failure.error:
            case VersionGoneError():
                served = {load.version for load in self.dispatch.loads()}
                require(failure.error.version not in served, f"{self._owner}: {failure}, and it is served")
            case ReplicaError():
                require(not self._ports, f"{self._owner}: {failure}, and {len(self._ports)} replicas are up")
            case QueueFullError():
                is_late = self._config.max_ttft_s is not None and bool(self._ports)
                require(is_late, f"{self._owner}: {failure}, and it waited already")
            case RequestQuarantinedError():
                enough = self.num_replicas_lost >= self._config.max_replicas_lost
                require(enough, f"{self._owner}: {failure}, and {self.num_replicas_lost} replicas were lost")

"""Dispatch host: runs the dispatcher core. It passes events and the time in, and performs the actions that come out.
Nothing here waits, so it runs under any clock, a simulated one included.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from holdfast.router.demand import ModelDemand
from holdfast.router.dispatch.dispatch import Dispatch
from holdfast.router.dispatch.request_state import RequestState
from holdfast.router.dispatch.request_stream import OutputStream, Sink, UnreadLimit
from holdfast.router.events import Action, ClusterEvent, Fail, SendAbort, SendAhead, SendSubmit, SendTakePins
from holdfast.router.generation import OutputDelta
from holdfast.router.operator_state import OperatorState
from holdfast.worker.errors import HoldfastError, InternalError
from holdfast.worker.model_info import ReplicaFacts
from holdfast.worker.request import EngineLoad, RequestKey, SequenceKey
from holdfast.worker.step_update import StepUpdate

logger = logging.getLogger(__name__)


NUM_NEWS: Final = 100

FINEST_S: Final = 0.001
"""No timer is set nearer. uvloop's clock has a resolution of 1 ms: a nearer timer would fire again and again."""


class ReplicaPort(Protocol):
    """The outbox of one replica. Never blocks."""

    def submit(self, action: SendSubmit) -> None: ...

    def abort(self, action: SendAbort) -> None: ...

    def take_pins(self, action: SendTakePins) -> None: ...

    def fetch_ahead(self, action: SendAhead) -> None: ...


class Alarm(Protocol):
    """A scheduled call that can be cancelled. It has no `when`: uvloop's handles lack it for near times."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """A clock in seconds that can schedule calls. An asyncio event loop is one."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> Alarm:
        """Calls back once, at `when` or later, or earlier by less than the clock's resolution."""


class DispatchHost:
    """Connects clients' output streams and replicas' links to the core. Single-threaded, callbacks included."""

    def __init__(
        self,
        dispatch: Dispatch,
        clock: Clock,
        on_models_changed: Callable[[], None],
        max_unread_tokens: int | None = None,
    ) -> None:
        """A request with `max_unread_tokens` that its client does not read is suspended until it does; None: never."""
        self.dispatch = dispatch
        """The core. Queries go to it directly; every event goes through this host."""
        self.now = clock.time
        """The clock of all deadlines, in seconds."""
        self._clock = clock
        self._on_models_changed = on_models_changed
        self._ports: dict[str, ReplicaPort] = {}
        self._streams: dict[SequenceKey, OutputStream] = {}
        self._timer: Alarm | None = None
        self._timer_due = math.inf
        """When the timer fires; infinity without one."""
        self.news: deque[ClusterEvent] = deque(maxlen=NUM_NEWS)
        """Latest events of replicas, the oldest first."""
        self._unread: list[OutputStream] = []
        """Streams whose requests will be suspended after the current actions."""
        self._unread_limit: UnreadLimit | None = None
        if max_unread_tokens is not None:
            self._unread_limit = UnreadLimit(
                num_tokens=max_unread_tokens, on_unread=self._unread.append, on_read=self._go_on
            )
        self._when_idle: list[Callable[[], None]] = []
        self._when_free: list[tuple[str, Callable[[], None]]] = []

    # --- for clients ---

    def supersede(self, key: RequestKey, client_attempt: int = 0) -> None:
        """Like `Dispatch.supersede`: most likely the client has lost the connection, and submits its request again."""
        if actions := self.dispatch.supersede(key, client_attempt, self.now()):
            self.perform(actions)

    def open(self, state: RequestState, sink: Sink) -> OutputStream:
        """Opens one sequence of a request, which is not open: see `supersede`. Raises what `Dispatch.submit` raises.
        The caller that opens a stream closes it.
        """
        stream = OutputStream(state.key, sink, self.now, self._unread_limit, state.timeline)
        actions = self.dispatch.submit(state, self.now())
        self._streams[stream.key] = stream
        self.perform(actions)
        return stream

    def close(self, stream: OutputStream) -> None:
        """Closes a stream that is no longer read. If its request is still open, it is cancelled."""
        if self._streams.get(stream.key) is stream:
            self._end_stream(stream.key)
            self.perform(self.dispatch.cancel(stream.key, self.now()))

    def abort(self, stream: OutputStream) -> bool:
        """Ends the request of a stream, if it is still open, with finish reason ABORT. Returns whether it was."""
        is_open = self._streams.get(stream.key) is stream
        if is_open:
            self.perform(self.dispatch.abort(stream.key, self.now()))
        return is_open

    def fail(self, stream: OutputStream, error: HoldfastError) -> bool:
        """Ends the request of a stream, if it is still open, with an error. Returns whether it was."""
        is_open = self._streams.get(stream.key) is stream
        if is_open:
            self.perform(self.dispatch.fail(stream.key, error, self.now()))
        return is_open

    # --- for links ---

    def replica_up(self, port: ReplicaPort, facts: ReplicaFacts, load: EngineLoad) -> None:
        """Adds a replica that has said hello on its link."""
        self._ports[facts.replica_id] = port
        self._note_news("up", facts.replica_id, facts.model)
        self.perform(self.dispatch.replica_up(facts, load, self.now()))
        self._on_models_changed()

    def replica_update(self, replica_id: str, update: StepUpdate) -> None:
        self.perform(self.dispatch.step(replica_id, update, self.now()))

    def replica_retiring(self, replica_id: str, is_retiring: bool) -> None:
        """Like `Dispatch.replica_retiring`. Links repeat it with every view of the directory: only a change is an
        event.
        """
        if self.dispatch.is_retiring(replica_id) is not is_retiring and replica_id in self._ports:
            self._note_news("leaving" if is_retiring else "back", replica_id)
        self.perform(self.dispatch.replica_retiring(replica_id, is_retiring, self.now()))

    def replica_down(self, replica_id: str, error: HoldfastError) -> None:
        """Removes a lost replica; its requests are attempted elsewhere or fail with `error`."""
        if self._ports.pop(replica_id, None) is not None:
            self._note_news("lost", replica_id, reason=str(error))
        try:
            self._see_through(
                "dealing with a lost replica", lambda: self.dispatch.replica_down(replica_id, error, self.now())
            )
        finally:
            self._on_models_changed()

    def models_removed(self, names: frozenset[str]) -> None:
        """These models are removed; all others are served, if they have replicas."""
        self._see_through("taking models away", lambda: self.dispatch.models_removed(names))
        self._on_models_changed()

    def models_asleep(self, waits_s: Mapping[str, float]) -> None:
        """Like `Dispatch.models_asleep`."""
        self.dispatch.models_asleep(waits_s)
        self._on_models_changed()

    def set_operator_state(self, operator_state: OperatorState) -> None:
        """Operators have ordered something."""
        self._see_through("the operator state", lambda: self.dispatch.set_operator_state(operator_state, self.now()))

    # --- the end ---

    def hand_over(self, error: HoldfastError) -> None:
        """Ends with `error` every open request whose client will resume it at another router."""
        self.perform(self.dispatch.hand_over(error))

    def close_all(self, error: HoldfastError) -> None:
        """Ends every open request with `error`."""
        self.perform(self.dispatch.close_all(error))

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Calls back once, as soon as no request is open."""
        self._when_idle.append(callback)
        self._note_idle()

    def when_free(self, replica_id: str, callback: Callable[[], None]) -> None:
        """Calls back once, as soon as a replica has no attempt of this router."""
        self._when_free.append((replica_id, callback))
        self._note_idle()

    # --- queries ---

    def demands(self) -> tuple[ModelDemand, ...]:
        """Like `Dispatch.demands`, at the current time."""
        return self.dispatch.demands(self.now())

    def check_integrity(self) -> None:
        """Asserts that there is one stream for each open request, and one port for each replica that is up."""
        self.dispatch.check_integrity()
        assert len(self._streams) == self.dispatch.num_open
        assert self._ports.keys() == {load.replica_id for load in self.dispatch.loads()}

    def perform(self, actions: list[Action]) -> None:
        """Performs actions of the core, in order. Every action of the core passes through here.

        An exception in an action ends only the request of that action.
        """
        try:
            self._set_timer()
        finally:  # a timer that cannot be set loses no action
            self._perform(actions)

    # --- inside ---

    def _perform(self, actions: list[Action]) -> None:
        broken, streams = [], self._streams
        for action in actions:
            try:
                if isinstance(action, OutputDelta):  # as nearly all of them are
                    streams[action.key].push(action)
                    if action.finish_reason is not None:
                        self._end_stream(action.key)
                else:
                    self._carry_out(action)
            except Exception:  # a bug ends the request of this action alone
                logger.exception("%s failed: internal error", type(action).__name__)
                broken.append(action)
        for action in broken:
            self._end_broken(action)
        if self._unread:
            self._suspend_unread()

    def _suspend_unread(self) -> None:
        """A request that cannot be suspended now is tried again at its next delta."""
        unread = self._unread.copy()
        self._unread.clear()
        for stream in unread:
            if self._streams.get(stream.key) is stream and not stream.is_suspended:
                actions = self.dispatch.suspend(stream.key, self.now())
                stream.is_suspended = bool(actions)
                self.perform(actions)

    def _go_on(self, stream: OutputStream) -> None:
        if self._streams.get(stream.key) is stream:
            self.perform(self.dispatch.go_on(stream.key, self.now()))

    def _note_news(self, kind: str, replica_id: str, model: str = "", reason: str = "") -> None:
        num_requests = self.dispatch.num_attempts(replica_id)
        known = model or self.dispatch.model_of(replica_id)
        event = ClusterEvent(
            at_s=self.now(), kind=kind, replica_id=replica_id, model=known, reason=reason, num_requests=num_requests
        )
        self.news.append(event)

    def _carry_out(self, action: SendSubmit | SendAbort | SendAhead | SendTakePins | Fail) -> None:
        match action:
            case SendSubmit():
                self._ports[action.replica_id].submit(action)
            case SendAbort():
                self._ports[action.replica_id].abort(action)
            case SendTakePins():
                self._ports[action.replica_id].take_pins(action)
            case SendAhead():
                self._ports[action.replica_id].fetch_ahead(action)
            case Fail():
                self._streams[action.key].fail(action.error)
                self._end_stream(action.key)

    def _end_broken(self, action: Action) -> None:
        """Ends the request of an action that raised. No caller waits for an abort, blocks ahead or pins."""
        if not isinstance(action, SendAbort | SendAhead | SendTakePins):
            key = action.request.sequence_key if isinstance(action, SendSubmit) else action.key
            if key in self._streams:
                message = f"request {key.request_id} failed: internal error of the router"
                self._streams[key].fail(InternalError(message))
                self._end_stream(key)
            self.perform(self.dispatch.cancel(key, self.now()))

    def _end_stream(self, key: SequenceKey) -> None:
        del self._streams[key]
        if self._when_idle or self._when_free:
            self._note_idle()

    def _note_idle(self) -> None:
        if not self._streams:
            waiting, self._when_idle = self._when_idle, []
            for callback in waiting:
                callback()
        if self._when_free:
            due = [item for item in self._when_free if not self.dispatch.is_busy(item[0])]
            self._when_free = [item for item in self._when_free if item not in due]
            for _, callback in due:
                callback()

    def _set_timer(self) -> None:
        """Sets the timer to the core's next tick, but no nearer than `FINEST_S`. An earlier timer stays as it is."""
        wanted = self.dispatch.next_tick
        if wanted is None or self._timer_due <= (due := max(wanted, self.now() + FINEST_S)):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_due = self._clock.call_at(due, self._tick), due

    def _tick(self) -> None:
        self._timer, self._timer_due = None, math.inf
        self._see_through("the router's timer", lambda: self.dispatch.tick(self.now()))

    def _see_through(self, event: str, decide: Callable[[], list[Action]]) -> None:
        """Runs an event without a caller who could handle its failure. If it raises, every open request is ended."""
        try:
            self.perform(decide())
        except Exception:
            logger.exception("%s failed; every open request is ended", event)
            self.close_all(InternalError(f"{event} failed"))

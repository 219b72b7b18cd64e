"""Simulated router: the real dispatch host, dispatch core and calls in virtual time.

Written anew is only what asyncio and gRPC would bring: dialling, hearing of a lost connection (in place of
`router/links/replica_link.py` and `router/links/link_pool.py`), and waiting for calls (in place of
`router/requests/request_processor.py` and `router/requests/answer.py`).
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from holdfast.cluster.simulate.actors.audit import AuditedDispatchHost
from holdfast.cluster.simulate.actors.costly_message import End
from holdfast.cluster.simulate.actors.messages import Admitted, DialReplica, Generate, Resets, Retiring
from holdfast.cluster.simulate.actors.replica import MODEL, SimulatedReplica
from holdfast.cluster.simulate.actors.router_apis import ApiSettings, RouterApis
from holdfast.cluster.simulate.kernel.network import Connection, Network
from holdfast.cluster.simulate.kernel.process import Process, SettableClock
from holdfast.cluster.simulate.kernel.timeline import Violation, require
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.admission import OVERFLOW
from holdfast.router.dispatch.circuit_breaker import Backoff
from holdfast.router.dispatch.dispatch import Dispatch
from holdfast.router.dispatch.endings import stopping
from holdfast.router.dispatch.request_state import RequestState, siblings
from holdfast.router.dispatch.request_stream import RequestStream, WakingSink
from holdfast.router.events import FRESH, Fail, SendAbort, SendAhead, SendSubmit, SendTakePins, TextState
from holdfast.router.operator_state import NO_OPERATOR_STATE, OperatorState
from holdfast.router.resume import resumed
from holdfast.worker.config import ServiceOrderConfig
from holdfast.worker.errors import HoldfastError, QueueFullError, ReplicaError
from holdfast.worker.request import EngineRequest, SequenceKey
from holdfast.worker.step_update import Hello, StepUpdate

RESTART_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class UpdateWait:
    """Time that a step update waited in a router for its event loop."""

    at_s: float
    wait_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedLink:
    """The router's end of the link to one replica, dial after dial. A `ReplicaPort` while it is up."""

    router: Process
    replica: SimulatedReplica
    backoff: Backoff
    connection: Connection
    replica_id: str | None = None
    """None unless it is up."""

    def submit(self, action: SendSubmit) -> None:
        self.connection.send(self.router, action)

    def abort(self, action: SendAbort) -> None:
        self.connection.send(self.router, action)

    def take_pins(self, action: SendTakePins) -> None:
        self.connection.send(self.router, action)

    def fetch_ahead(self, action: SendAhead) -> None:
        self.connection.send(self.router, action)


class SimulatedRouter(Process):
    """One router, life after life."""

    def __init__(
        self,
        site: str,
        network: Network,
        replicas: list[SimulatedReplica],
        config: RouterConfig,
        limits: LimitsConfig,
        *,
        make_text: Callable[[EngineRequest], TextState],
        seed: int,
        order: ServiceOrderConfig | None = None,
        max_lag_s: float = 0.0,
        apis: ApiSettings | None = None,
        hangs_after_s: float | None = None,
    ) -> None:
        """Calls are read with a lag of up to `max_lag_s`, mostly with a short one; output that arrived by then is
        merged.

        Without `apis` every call is admitted at once, and its loop is never busy. Without `hangs_after_s` it has no
        hang supervisor.
        """
        super().__init__(site, network, hangs_after_s)
        self._apis: RouterApis | None = None
        self._ends_in_order = False
        self._config = config
        self._limits = limits
        self._replicas = replicas
        self._make_text = make_text
        self._order = order
        self._rng = random.Random(seed)
        self._max_lag_s = max_lag_s
        self._operator_state = NO_OPERATOR_STATE
        self._api_settings = apis
        self.num_hung = 0
        """Times that its hang supervisor killed it."""
        self.num_crashed = 0
        """Times that it ended while it read a call."""
        self.longest_decoding_s = 0.0
        """Longest decoding of one message in the interpreter, in seconds."""
        self.num_resets = 0
        """Calls that were reset, and that its loop has looked at."""
        self.update_waits: list[UpdateWait] = []
        """Waits of step updates with tokens, in all lives."""

    def on_start(self) -> None:
        dispatch = Dispatch(self._config, self._limits, self._rng.randrange, order=self._order)
        self._clock = SettableClock(self)
        self.dispatch_host = AuditedDispatchHost(self, dispatch, self._clock, self._config)
        self.dispatch_host.set_operator_state(self._operator_state)
        self._links: dict[Connection, SimulatedLink] = {}
        self._calls: dict[Connection, RequestStream] = {}
        self._unread: dict[Connection, None] = {}
        """Calls with news, in the order in which it came."""
        self.is_stopping = self._ends_in_order = False
        self._apis = None if self._api_settings is None else RouterApis(self, self._api_settings)
        for replica in self._replicas:
            self._dial(replica, Backoff(max_pause_s=self._config.max_reconnect_s))

    def on_message(self, connection: Connection, message: Any) -> None:
        """Acts on a message of a replica's or a client's."""
        if connection in self._links:
            self._handle(self._links[connection], message)
        elif isinstance(message, Generate):
            self._open_at_once(connection, message)

    def receive(self, connection: Connection, message: Any) -> None:
        """Passes clients' messages through the simulated APIs, where there are some."""
        if self.is_up and self._apis is not None and isinstance(message, Generate | Resets):
            self.connections.setdefault(connection)
            self._apis.arrives(connection, message)
        else:
            super().receive(connection, message)

    def cost_s(self, message: Any) -> float:
        return 0.0 if self._apis is None else self._apis.cost_s(message)

    def on_hang(self) -> None:
        self.num_hung += 1
        for callback in self.loop.undone():
            if any(isinstance(argument, StepUpdate) for argument in callback.args):  # it is never handled
                self.update_waits.append(UpdateWait(self.timeline.now, self.timeline.now - callback.came_s))
        self._restart()

    def on_closed(self, connection: Connection) -> None:
        if connection in self._links:
            self._link_lost(connection)
            return
        if connection in self._calls:
            self._calls.pop(connection).close()
        if self._apis is not None:
            self._apis.gone(connection)

    # --- faults ---

    def stop(self, *, hands_over: bool) -> None:
        """Stops taking new requests. With `hands_over` its calls end at once, to continue at another router."""
        self.is_stopping = True
        if hands_over:
            self.dispatch_host.hand_over(stopping())
            num_open = self.dispatch_host.dispatch.num_open
            require(num_open == 0, f"{self}: {num_open} requests were not handed over")

    def replace(self) -> None:
        """If it is stopping, ends it and starts the next one."""
        if self.is_up and self.is_stopping:
            self._ends_in_order = True
            self._restart()

    def _restart(self) -> None:
        self.kill()
        self.timeline.after(RESTART_S, self.revive)

    def _die(self) -> list[Connection]:
        if self._apis is not None:
            self._count(self._apis)
            self._apis.close(in_order=self._ends_in_order)
        return super()._die()

    def join(self, replica: SimulatedReplica) -> None:
        """A replica that was not there has started: the router dials it."""
        self._replicas.append(replica)
        self._dial(replica, Backoff(max_pause_s=self._config.max_reconnect_s))

    def remove_replica(self, replica: SimulatedReplica) -> None:
        """A replica has ended for good: once its link is lost, it is not dialled again."""
        self._replicas.remove(replica)

    def jump_clock(self, seconds: float) -> None:
        """The clock is set, forwards or backwards."""
        self.clock_offset_s += seconds
        if self.is_up:
            self._do(self._clock.note_set)

    def order(self, operator_state: OperatorState) -> None:
        """The directory tells what operators have ordered; a router that starts later learns it then."""
        self._operator_state = operator_state
        if self.is_up:
            self._do(lambda: self.dispatch_host.set_operator_state(self._operator_state))

    def _count(self, apis: RouterApis) -> None:
        self.longest_decoding_s = max(self.longest_decoding_s, apis.longest_decoding_s)
        self.num_resets += apis.guarded.num_resets
        apis.longest_decoding_s, apis.guarded.num_resets = 0.0, 0

    def count(self) -> None:
        """Brings the counts of all lives up to date."""
        if self._apis is not None:
            self._count(self._apis)

    # --- links ---

    def _dial(self, replica: SimulatedReplica, backoff: Backoff) -> None:
        connection = self.connect(replica.site, replica)
        self._links[connection] = SimulatedLink(router=self, replica=replica, backoff=backoff, connection=connection)
        connection.send(self, DialReplica())
        self.after(self._config.connect_timeout_s, self._expect_hello, connection)

    def _expect_hello(self, connection: Connection) -> None:
        if connection in self._links and self._links[connection].replica_id is None:
            self.hang_up(connection)
            self._link_lost(connection)

    def _handle(self, link: SimulatedLink, message: Any) -> None:
        match message:
            case StepUpdate() if link.replica_id is not None:
                if message.deltas or message.plain.attempts:
                    self.update_waits.append(UpdateWait(self.timeline.now, self.loop.wait_s))
                self.dispatch_host.replica_update(link.replica_id, message)
            case Hello():
                link.backoff.note_up()
                link.replica_id = message.facts.replica_id
                self.dispatch_host.replica_up(link, message.facts, message.load)
            case Retiring() if link.replica_id is not None:
                self.dispatch_host.replica_retiring(link.replica_id, message.is_retiring)

    def _link_lost(self, connection: Connection) -> None:
        link = self._links.pop(connection)
        if link.replica_id is None:
            link.backoff.note_failure()
        else:
            self.dispatch_host.replica_down(link.replica_id, ReplicaError(f"replica {link.replica_id} was lost"))
        if link.replica in self._replicas:
            self.after(link.backoff.pause_s(self._rng.random()), self._dial, link.replica, link.backoff)

    # --- calls ---

    def _open_at_once(self, connection: Connection, message: Generate) -> None:
        try:
            self.open(connection, message)
        except HoldfastError as error:
            self.refuse(connection, message, error)

    def open(self, connection: Connection, message: Generate) -> RequestStream:
        """Opens an admitted call. Raises `HoldfastError`."""
        request, num_before = message.request, self.dispatch_host.dispatch.num_queued
        if self.is_stopping:
            raise stopping()
        sequences = [self._sequence(sibling, message) for sibling in siblings(request)]
        call = RequestStream(request)
        try:
            call.open(self.dispatch_host, sequences, WakingSink(partial(self._note_output, connection)))
        except QueueFullError as error:
            require(self.num_open > 0, f"{self}: {request.request_id} is alone, and was refused: {error}")
            raise
        self._calls[connection] = call
        connection.send(self, Admitted())
        is_new, most = not any(one.request.output_token_ids for one in sequences), OVERFLOW * self._limits.max_queued
        if is_new and self.dispatch_host.dispatch.num_queued > max(num_before, most):
            raise Violation(f"{self}: {request.request_id} is queued beyond {most}")
        return call

    def _sequence(self, sibling: EngineRequest, message: Generate) -> RequestState:
        text, caught_up = self._make_text(sibling), FRESH
        if message.resume is not None:
            sibling, caught_up = resumed(sibling, text, message.resume)
        return RequestState(
            request=sibling,
            model=MODEL,
            text=text,
            caught_up=caught_up,
            deadline=self.clock + message.timeout_s,
            client_attempt=message.attempt,
        )

    def refuse(self, connection: Connection, message: Generate, error: HoldfastError) -> None:
        connection.send(self, Fail(key=message.request.sequence_key, error=error))
        self.hang_up(connection)

    def end(self, how: End) -> None:
        """A message that it reads ends its process, or keeps its loop for ever."""
        if how is End.HANG:
            self.loop.call(lambda: math.inf, self.on_hang)
        else:
            self.num_crashed += 1
            self._restart()

    def _note_output(self, connection: Connection) -> None:
        """Schedules the reading of arrived output."""
        if not self._unread:
            self.after(self._max_lag_s * self._rng.random() ** 8, self._read_all)
        self._unread[connection] = None

    def _read_all(self) -> None:
        unread, self._unread = self._unread, {}
        for connection in unread:
            if connection in self._calls:
                self._read(connection, self._calls[connection])

    def _read(self, connection: Connection, call: RequestStream) -> None:
        try:
            while (delta := call.poll()) is not None:
                connection.send(self, delta)
            if not call.is_over:
                return
        except HoldfastError as error:
            connection.send(self, Fail(key=SequenceKey("", call.request.request_id), error=error))
        del self._calls[connection]
        call.close()
        if self._apis is not None:
            self._apis.gone(connection)
        self.hang_up(connection)

    # --- what can be asked ---

    @property
    def num_open(self) -> int:
        return self.dispatch_host.dispatch.num_open

    def work(self, cost_s: Callable[[], float], action: Callable[[], None]) -> None:
        """On its event loop, where it takes time."""
        self.loop.call(cost_s, action)

    def go_on(self, cost_s: float, action: Callable[[], None]) -> None:
        self.loop.go_on(cost_s, action)

    @property
    def num_links_up(self) -> int:
        return sum(link.replica_id is not None for link in self._links.values())

    def check_integrity(self) -> None:
        """Asserts that the books agree, and that each open request is some call's."""
        self.dispatch_host.check_integrity()
        if self._apis is not None:
            self._apis.check_integrity()
        num_wanted = sum(len(call.streams) for call in self._calls.values())
        assert self.dispatch_host.dispatch.num_open <= num_wanted, "a call has ended, and its requests go on"

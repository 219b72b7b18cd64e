"""A router that is simulated: the real dispatch core in virtual time, its links to replicas, its clients' calls.

What `router/switchboard.py`, `links.py` and `server.py` do around the core, without sockets. What may not live here:
decisions, which are the core's.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from cluster.simulate.attempts import AttemptBooks
from cluster.simulate.messages import Dial, Generate, Hello, Retiring
from cluster.simulate.network import Connection, Network
from cluster.simulate.process import Process
from cluster.simulate.promises import Violation, require
from cluster.simulate.replica import MODEL, SimulatedReplica
from router.config import LimitsConfig, RouterConfig
from router.dispatch import Dispatch
from router.events import FRESH, Action, Deliver, Fail, SendAbort, SendSubmit, StepNews, TextState
from router.policy import ChooseReplica, power_of_two_choices
from router.resume import catch_up, last_words
from worker.errors import HoldfastError, ReplicaError, RequestQuarantinedError
from worker.request import EngineRequest

FIRST_PAUSE_S: Final = 0.05
TIMER_S: Final = 1e-6
"""A timer is never set for sooner than a clock can tell: sums of floats are not exact."""


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
        choose: ChooseReplica = power_of_two_choices,
    ) -> None:
        super().__init__(site, network)
        self.config = config
        self.limits = limits
        self._replicas = replicas
        self._make_text = make_text
        self._choose = choose
        self._rng = random.Random(seed)

    def on_start(self) -> None:
        self.dispatch = Dispatch(self.config, self.limits, self._rng.randrange, self._choose)
        self._links: dict[Connection, SimulatedReplica] = {}
        self._replica_ids: dict[Connection, str] = {}  # of links that are up
        self._link_of: dict[str, Connection] = {}  # by replica id
        self._num_failed = dict.fromkeys(self._replicas, 0)
        self._books = AttemptBooks(self)
        self._calls: dict[str, Connection] = {}
        self._request_ids: dict[Connection, str] = {}
        self._timer_s: float | None = None
        self.num_links_lost = 0
        """In this life, of links that were up."""
        for replica in self._replicas:
            self._dial(replica)

    # --- messages ---

    def on_message(self, connection: Connection, message: Any) -> None:
        match message:
            case StepNews():
                if connection in self._replica_ids:
                    self._books.note_news(message)
                    self._perform(self.dispatch.step(self._replica_ids[connection], message, self.clock))
            case Generate():
                self._open(connection, message)
            case Hello():
                if connection in self._links:
                    self._link_up(connection, message)
            case Retiring():
                if connection in self._replica_ids:
                    replica_id = self._replica_ids[connection]
                    self._perform(self.dispatch.replica_retiring(replica_id, message.is_retiring, self.clock))

    def on_closed(self, connection: Connection) -> None:
        if connection in self._links:
            self._link_lost(connection)
        elif connection in self._request_ids:
            self._perform(self.dispatch.cancel(self._end_call(connection), self.clock))

    # --- links ---

    def _dial(self, replica: SimulatedReplica) -> None:
        connection = self.connect(replica.site, replica)
        self._links[connection] = replica
        connection.send(self, Dial())
        self.after(self.config.connect_timeout_s, self._expect_hello, connection)

    def _expect_hello(self, connection: Connection) -> None:
        if connection in self._links and connection not in self._replica_ids:
            self.hang_up(connection)
            self._link_lost(connection)

    def _link_up(self, connection: Connection, hello: Hello) -> None:
        replica_id = hello.facts.replica_id
        self._num_failed[self._links[connection]] = 0
        self._replica_ids[connection] = replica_id
        self._link_of[replica_id] = connection
        self._perform(self.dispatch.replica_up(hello.facts, hello.load, self.clock))

    def _link_lost(self, connection: Connection) -> None:
        replica = self._links.pop(connection)
        num_failed = self._num_failed[replica]
        self._num_failed[replica] = num_failed + 1
        self.after(min(FIRST_PAUSE_S * 2**num_failed, self.config.max_reconnect_s), self._dial, replica)
        replica_id = self._replica_ids.pop(connection, None)
        if replica_id is not None:
            del self._link_of[replica_id]
            self.num_links_lost += 1
            self._books.note_lost(replica_id)
            error = ReplicaError(f"replica {replica_id} was lost")
            self._perform(self.dispatch.replica_down(replica_id, error, self.clock))

    # --- calls ---

    def _open(self, connection: Connection, call: Generate) -> None:
        try:
            word: Deliver | Fail | None = self._admit(connection, call)
        except HoldfastError as error:
            word = Fail(request_id=call.request.request_id, error=error)
        if word is not None:
            connection.send(self, word)
            self.hang_up(connection)

    def _admit(self, connection: Connection, call: Generate) -> Deliver | None:
        """What `router/intake.py` does. Returns the answer if there is nothing left to do."""
        request, text, caught_up = call.request, self._make_text(call.request), FRESH
        if call.resume is not None:
            caught_up = catch_up(text, call.resume, 0)
            request = replace(request, output_token_ids=call.resume.progress(0).token_ids)
        if caught_up.is_over:
            return last_words(request, caught_up)
        self._perform(self.dispatch.supersede(request.request_id, self.clock))
        most = max(self.dispatch.num_queued, self.limits.max_queued)
        deadline = self.clock + call.timeout_s
        actions = self.dispatch.submit(
            request, model=MODEL, text=text, deadline=deadline, now=self.clock, caught_up=caught_up
        )
        if self.dispatch.num_queued > most:
            raise Violation(f"{self}: {request.request_id} is queued beyond {most}")
        self._calls[request.request_id] = connection
        self._request_ids[connection] = request.request_id
        self._perform(actions)
        return None

    def _end_call(self, connection: Connection) -> str:
        request_id = self._request_ids.pop(connection)
        del self._calls[request_id]
        return request_id

    # --- actions ---

    def _perform(self, actions: list[Action]) -> None:
        over: list[str] = []
        for action in actions:
            match action:
                case Deliver():
                    self._tell(action)
                    if action.finish_reason is not None:
                        over.append(self._hang_up(action.request_id))
                case SendSubmit():
                    self._books.note_submit(action)
                    self._link_of[action.replica_id].send(self, action)
                case SendAbort():
                    self._books.note_abort(action)
                    self._link_of[action.replica_id].send(self, action)
                case Fail():
                    self._check_excuse(action)
                    self._tell(action)
                    over.append(self._hang_up(action.request_id))
        self._books.check_over(over)
        self._set_timer()

    def _tell(self, word: Deliver | Fail) -> None:
        self._calls[word.request_id].send(self, word)

    def _hang_up(self, request_id: str) -> str:
        connection = self._calls[request_id]
        self._end_call(connection)
        self.hang_up(connection)
        return request_id

    def _check_excuse(self, failure: Fail) -> None:
        """A router may give up for lack of replicas alone, and if several have died under the request."""
        match failure.error:
            case ReplicaError():
                require(not self._link_of, f"{self}: {failure}, and {len(self._link_of)} replicas are up")
            case RequestQuarantinedError():
                enough = self.num_links_lost >= self.config.max_replicas_lost
                require(enough, f"{self}: {failure}, and {self.num_links_lost} replicas were lost")

    def _set_timer(self) -> None:
        wanted = self.dispatch.next_tick
        if wanted is not None and (self._timer_s is None or wanted < self._timer_s):
            self._timer_s = wanted
            self.after(max(TIMER_S, wanted - self.clock), self._tick, wanted)

    def _tick(self, wanted: float) -> None:
        if wanted == self._timer_s:
            self._timer_s = None
            self._perform(self.dispatch.tick(self.clock))

    def jump_clock(self, seconds: float) -> None:
        """The clock is set, forwards or backwards; timers go by the clock."""
        self.clock_offset_s += seconds
        self._timer_s = None
        if self.is_up:
            self._do(self._set_timer)

    # --- what can be asked ---

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def num_links_up(self) -> int:
        return len(self._link_of)

    def check_integrity(self) -> None:
        """Asserts that there is a call for each open request, and a link for each replica that is up."""
        self.dispatch.check_integrity()
        assert len(self._calls) == self.dispatch.num_open, "calls and open requests differ"
        assert self._link_of.keys() == {load.replica_id for load in self.dispatch.loads()}, "links and replicas differ"

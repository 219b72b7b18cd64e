"""A router that is simulated: the real dispatch core in virtual time, its links to replicas, its clients' calls.

What `router/switchboard.py`, `links.py` and `server.py` do around the core, without sockets. What may not live here:
decisions, which are the core's.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from cluster.simulate.attempts import AttemptBooks
from cluster.simulate.messages import Dial, Generate, Hello, Retiring
from cluster.simulate.network import Connection, Network
from cluster.simulate.process import Process
from cluster.simulate.promises import Violation, require
from cluster.simulate.replica import MODEL, SimulatedReplica
from router.config import LimitsConfig, RouterConfig
from router.dispatch import Dispatch
from router.events import FRESH, Action, CaughtUp, Deliver, Fail, SendAbort, SendSubmit, StepNews, TextState, Usage
from router.parallel_sampling import merged_usage, siblings
from router.policy import ChooseReplica, power_of_two_choices
from router.resume import catch_up, last_words
from worker.errors import HoldfastError, ReplicaError, RequestAbortedError, RequestQuarantinedError
from worker.request import EngineRequest

FIRST_PAUSE_S: Final = 0.05
RESTART_S: Final = 0.5
TIMER_S: Final = 1e-6
"""A timer is never set for sooner than a clock can tell: sums of floats are not exact."""


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One client's call: its completions, together on one connection."""

    connection: Connection
    request_id: str
    open: dict[str, int] = field(default_factory=dict)
    """By the id of a sibling that has not ended: its number."""
    usages: list[Usage] = field(default_factory=list)
    """Of those that have ended."""


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
        self._calls: dict[str, Call] = {}  # by the id of an open sibling
        self._call_on: dict[Connection, Call] = {}
        self.is_stopping = False
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
        elif connection in self._call_on:
            self._cancel(self._call_on.pop(connection))

    # --- what the world does to it ---

    def stop(self, *, hands_over: bool) -> None:
        """It takes nothing new. With `hands_over` its calls end at once, to go on at another router."""
        self.is_stopping = True
        if hands_over:
            self._perform(self.dispatch.hand_over(_stopping()))
            require(self.dispatch.num_open == 0, f"{self}: {self.dispatch.num_open} requests were not handed over")

    def replace(self) -> None:
        """If it was to go, it goes, and the next one comes."""
        if self.is_up and self.is_stopping:
            self.kill()
            self.timeline.after(RESTART_S, self.revive)

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

    def _open(self, connection: Connection, message: Generate) -> None:
        """What `router/intake.py` does: all siblings are opened, or none."""
        call = Call(connection=connection, request_id=message.request.request_id)
        self._call_on[connection] = call
        try:
            if self.is_stopping:
                raise _stopping()
            parts = [self._part(sibling, number, message) for number, sibling in enumerate(siblings(message.request))]
            for number, (sibling, text, caught_up) in enumerate(parts):
                call.open[sibling.request_id] = number
                if caught_up.finish_reason is None:
                    self._admit(call, sibling, text, caught_up, message)
        except HoldfastError as error:
            self._end_call(call, Fail(request_id=call.request_id, error=error))
            self._cancel(call)
            return
        for sibling, _, caught_up in parts:
            if caught_up.finish_reason is not None:
                self._tell(call, last_words(sibling, caught_up))

    def _part(
        self, sibling: EngineRequest, number: int, message: Generate
    ) -> tuple[EngineRequest, TextState, CaughtUp]:
        """One completion, brought to where the client is."""
        text = self._make_text(sibling)
        if message.resume is None:
            return sibling, text, FRESH
        caught_up = catch_up(text, message.resume, number)
        return replace(sibling, output_token_ids=message.resume.progress(number).token_ids), text, caught_up

    def _admit(
        self, call: Call, sibling: EngineRequest, text: TextState, caught_up: CaughtUp, message: Generate
    ) -> None:
        request_id, now = sibling.request_id, self.clock
        self._perform(self.dispatch.supersede(request_id, message.attempt, now))
        num_before = self.dispatch.num_queued
        actions = self.dispatch.submit(
            sibling,
            model=MODEL,
            text=text,
            deadline=now + message.timeout_s,
            now=now,
            caught_up=caught_up,
            client_attempt=message.attempt,
        )
        is_new = not sibling.output_token_ids
        if is_new and self.dispatch.num_queued > max(num_before, self.limits.max_queued):
            raise Violation(f"{self}: {request_id} is queued beyond {self.limits.max_queued}")
        self._calls[request_id] = call
        self._perform(actions)

    def _tell(self, call: Call, delivery: Deliver) -> None:
        """What `router/answer.py` makes of a sibling's delivery."""
        number, told = call.open[delivery.request_id], delivery
        if delivery.usage is not None:
            del call.open[delivery.request_id]
            call.usages.append(delivery.usage)
        if delivery.request_id != call.request_id:
            usage = None if call.open else merged_usage(call.usages)
            told = replace(delivery, request_id=call.request_id, sequence_index=number, usage=usage)
        if call.open:
            call.connection.send(self, told)
        else:
            self._end_call(call, told)

    def _end_call(self, call: Call, last_word: Deliver | Fail) -> None:
        """Nothing more is said on it."""
        if self._call_on.pop(call.connection, None) is not None:
            call.connection.send(self, last_word)
            self.hang_up(call.connection)

    def _cancel(self, call: Call) -> None:
        """Nobody waits any more for what is left of a call."""
        for request_id in [request_id for request_id in call.open if self._calls.get(request_id) is call]:
            del self._calls[request_id]
            self._perform(self.dispatch.cancel(request_id, self.clock))

    # --- actions ---

    def _perform(self, actions: list[Action]) -> None:
        over: list[str] = []
        failed: list[tuple[Call, Fail]] = []
        for action in actions:
            match action:
                case Deliver():
                    call = self._calls[action.request_id]
                    if action.finish_reason is not None:
                        over.append(action.request_id)
                        del self._calls[action.request_id]
                    self._tell(call, action)
                case SendSubmit():
                    self._books.note_submit(action)
                    self._link_of[action.replica_id].send(self, action)
                case SendAbort():
                    self._books.note_abort(action)
                    self._link_of[action.replica_id].send(self, action)
                case Fail():
                    self._check_excuse(action)
                    over.append(action.request_id)
                    failed.append((self._calls.pop(action.request_id), action))
        self._books.check_over(over)
        for call, failure in failed:
            self._end_call(call, failure)
            self._cancel(call)
        self._set_timer()

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
        assert set(self._call_on.values()) >= set(self._calls.values()), "a call has ended, and its requests go on"
        assert self._link_of.keys() == {load.replica_id for load in self.dispatch.loads()}, "links and replicas differ"


def _stopping() -> RequestAbortedError:
    return RequestAbortedError("this router is stopping")

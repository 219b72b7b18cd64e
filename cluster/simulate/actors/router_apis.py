"""APIs of a simulated router: its calls from their first byte until they are admitted, by the real cores.

Connection budgets, the byte ledger, the overload manager, the poison watch with its journal and the bounds of messages
are the real ones; the work of a router's APIs with sockets and threads is simulated as time.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from holdfast.cluster.simulate.actors.costly_message import Decoder, Decoding, End, LoopCosts
from holdfast.cluster.simulate.actors.disk import JournalFolder
from holdfast.cluster.simulate.actors.messages import Generate, Resets
from holdfast.cluster.simulate.kernel.network import Connection
from holdfast.cluster.simulate.kernel.process import SimulatedHangSupervisor
from holdfast.cluster.simulate.kernel.timeline import ThreadPool, Timeline
from holdfast.router.config import LimitsConfig, OverloadConfig, RouterConfig
from holdfast.router.dispatch.request_stream import RequestStream
from holdfast.router.overload.byte_ledger import ByteLedger, KnownPeers, Lease
from holdfast.router.overload.overload import Overload, OverloadWatch
from holdfast.router.requests.poison_watch import PoisonWatch, Reading, request_digest
from holdfast.router.requests.reading_journal import TURN_S, LeftJournal, ReadingJournal
from holdfast.router.security.connection_budgets import ENDING_STREAMS, GuardedConnections
from holdfast.router.wire.bounds import INLINE_BYTES
from holdfast.worker.errors import HoldfastError
from holdfast.worker.step_update import StepUpdate

NUM_THREADS: Final = 6
"""Threads of `asyncio.to_thread` on a machine with two cores: they compile grammars."""
CUT_S: Final = 1e-3
"""Seconds until a connection that is to be cut off has been found and closed."""
HANDED_OVER: Final = 5
"""Calls that are reset, and that gRPC hands to the loop in one turn: ten floods held a loop for 5 ms at most."""
MAX_PEERS: Final = 2**14  # addresses
END_SEEN_S: Final = 0.002
"""Seconds from the end of a process, which closes its connections, until other processes of its machine see it."""

IDLE_BYTES: Final = 170 * 2**20
"""Memory of a router without requests."""
MAX_MEMORY: Final = 2**30
"""Memory at which the pressure of memory is 1."""
MACHINE_BYTES: Final = 5 * 2**28
"""Beyond which there is no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Settings that the APIs of all routers of a simulation share."""

    costs: LoopCosts
    limits: LimitsConfig
    router: RouterConfig
    overload: OverloadConfig
    decoder: Decoder
    journals: JournalFolder


class Host(Protocol):
    """The router behind the APIs."""

    site: str
    num_lives: int
    timeline: Timeline
    connections: dict[Connection, None]
    hang_supervisor: SimulatedHangSupervisor | None

    @property
    def clock(self) -> float: ...
    @property
    def has_backlog(self) -> bool: ...
    @property
    def num_open(self) -> int:
        """Requests that are open."""

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None: ...
    def work(self, cost_s: Callable[[], float], action: Callable[[], None]) -> None:
        """On its event loop, where it takes time."""

    def go_on(self, cost_s: float, action: Callable[[], None]) -> None:
        """Same as `EventLoop.go_on`."""

    def hang_up(self, connection: Connection) -> None: ...
    def open(self, connection: Connection, message: Generate) -> RequestStream:
        """Opens an admitted call. Raises `HoldfastError`."""

    def refuse(self, connection: Connection, message: Generate, error: HoldfastError) -> None: ...
    def end(self, how: End) -> None:
        """Ends or hangs the process."""


class _Arrived:
    """A call that is not admitted yet. An `Ending` of its lease."""

    num_unread = 0

    def __init__(self, apis: "RouterApis", connection: Connection, message: Generate, lease: Lease) -> None:
        self._apis = apis
        self.connection = connection
        self.message = message
        self.lease = lease
        self.reading: Reading | None = None
        self.call: RequestStream | None = None
        self.built_bytes = 0
        lease.endings.append(self)

    def fail(self, error: HoldfastError) -> None:
        self._apis.refuse(self, error)


class RouterApis:
    """APIs of one life of a router."""

    def __init__(self, host: Host, settings: ApiSettings) -> None:
        self._host = host
        self._settings = settings
        self._name = f"{host.site}.{host.num_lives}"
        self._arrived: dict[Connection, _Arrived] = {}
        self._waiting: deque[tuple[Connection, Any]] = deque()
        """Calls that gRPC has, and the loop has not."""
        self._hands_over = False
        """One of them is on its way."""
        self._num_pending: Counter[Connection] = Counter()
        """Streams that were reset, and that the loop still has to look at."""
        self._decoding_s = 0.0
        """When the decode worker is free again."""
        self._decodings: deque[tuple[float, float]] = deque()
        """Until when it shares the interpreter, and until when it then holds it, job by job."""
        self._threads = ThreadPool(NUM_THREADS)
        self.longest_decoding_s = 0.0
        """Longest decoding of one message in the interpreter, in seconds."""
        self.guarded = GuardedConnections(settings.limits, asks_for_keys=False)
        self._peers = KnownPeers(MAX_PEERS)
        self.ledger = ByteLedger(settings.overload)
        self.ledger.on_input = self._note_input
        self.overload = Overload(settings.overload, self.ledger, MAX_MEMORY)
        self._overload_watch = OverloadWatch(self.overload)
        self.poison_watch = PoisonWatch(now=lambda: host.clock)
        self.poison_watch.is_read_elsewhere = self._is_read_elsewhere
        self._taken_journals: set[str] = set()
        self._journal = ReadingJournal(
            settings.journals.begin(self._name, partial(host.after, END_SEEN_S, self._take_journal, True))
        )
        self._journal.begin(host.timeline.now)
        self.poison_watch.journal = self._journal
        for router, buffer in settings.journals.left:
            self._take_journal(False, router, buffer)
        self._turn()
        self._look()

    def close(self, *, in_order: bool) -> None:
        """The process has ended."""
        if in_order:
            self._journal.note_in_order()
        self._settings.journals.end(self._name)

    def check_integrity(self) -> None:
        """Asserts that the ledger's leases are those of open calls."""
        self.ledger.check_integrity()
        assert self.ledger.num_leases == len(self._arrived), "a call has ended, and its lease goes on"

    # --- the clock ---

    def _turn(self) -> None:
        self._journal.turn(self._host.timeline.now)
        self._host.after(TURN_S, self._turn)

    def _look(self) -> None:
        wait_s = self._overload_watch.begin(self._host.timeline.now, self._host.num_open)
        self._host.after(wait_s, self._look_now)

    def _look_now(self) -> None:
        if self._overload_watch.look(self._host.timeline.now, self._resident_bytes, self._host.num_open):
            self.overload.note_shrunk()
        self._look()

    @property
    def _resident_bytes(self) -> int:
        return IDLE_BYTES + self.ledger.held_bytes + sum(one.built_bytes for one in self._arrived.values())

    def _is_read_elsewhere(self, digest: str, silent_s: float) -> bool:
        now = self._host.timeline.now
        others = self._settings.journals.others(self._name)
        unseen = (buffer for router, buffer in others if router not in self._taken_journals)
        return any(LeftJournal(buffer).is_reading(digest, silent_s, now) for buffer in unseen)

    def _take_journal(self, is_seen: bool, router: str, buffer: bytearray) -> None:
        self._taken_journals.add(router)
        left = LeftJournal(buffer)
        if is_seen:
            left.note_end(self._host.timeline.now)
        now = self._host.timeline.now
        if not left.says_nothing(now):
            self.poison_watch.note(left.losses(router, now, self._host.clock))

    def _note_input(self, num_bytes: int) -> None:
        if self._host.hang_supervisor is not None:
            self._host.hang_supervisor.note_input(num_bytes)

    # --- incoming calls ---

    def arrives(self, connection: Connection, message: Any) -> None:
        """A call, or a flood of resets, is there. gRPC hands calls over one after the other, as the loop turns."""
        if isinstance(message, Resets):
            most = self._settings.router.max_concurrent_streams + ENDING_STREAMS
            num_taken = min(message.num_streams, most - self._num_pending[connection])
            self._num_pending[connection] += num_taken
            for _ in range(num_taken // HANDED_OVER):
                self._waiting.append((connection, Resets(num_streams=HANDED_OVER)))
        else:
            self._waiting.append((connection, message))
        if not self._hands_over:
            self._hand_over()

    def _hand_over(self) -> None:
        while self._waiting and self._waiting[0][0] not in self._host.connections:
            self._waiting.popleft()  # it is gone
        self._hands_over = bool(self._waiting)
        if self._waiting:
            self._host.work(self._cost_of_next_s, self._take_next)

    def _cost_of_next_s(self) -> float:
        connection, message = self._waiting[0]
        return self.cost_s(message) if connection in self._host.connections else 0.0

    def _take_next(self) -> None:
        connection, message = self._waiting.popleft()
        if connection in self._host.connections:
            if isinstance(message, Resets):
                self._note_resets(connection, message.num_streams)
            else:
                self._take(connection, message)
        self._hand_over()

    def cost_s(self, message: Any) -> float:
        """Seconds of the loop before a message has any effect."""
        costs = self._settings.costs
        match message:
            case Resets():
                cost_s = costs.reset_s * message.num_streams
            case Generate():
                is_on_thread = message.costly is not None and len(message.costly.data) > INLINE_BYTES
                cost_s = costs.call_s + (costs.hand_off_s if is_on_thread else 0.0)
            case StepUpdate():
                cost_s = costs.of_update(message)
            case _:
                return 0.0
        return cost_s + self._wait_for_lock_s(cost_s)

    def _wait_for_lock_s(self, cost_s: float) -> float:
        """Seconds that the loop waits for the interpreter's lock, which a thread may hold. An idle loop gets it first;
        a busy loop gets every other time slice.
        """
        now, jobs, switch_s = self._host.timeline.now, self._decodings, self._settings.costs.switch_s
        while jobs and jobs[0][1] <= now:
            jobs.popleft()
        if not jobs:
            return 0.0
        shares_until_s, holds_until_s = jobs[0]
        if now >= shares_until_s:
            return holds_until_s - now
        return min(cost_s, switch_s) if self._host.has_backlog else switch_s

    def _note_resets(self, connection: Connection, num_streams: int) -> None:
        """Streams of a connection have been opened and reset at once."""
        self._num_pending[connection] -= num_streams
        now, guarded = self._host.timeline.now, self.guarded
        for _ in range(num_streams):
            guarded.reset(connection.peer if guarded.budgets.suspects(now) else "", began_at=now, now=now)
        self._cut()

    def _cut(self) -> None:
        if self.guarded.has_to_cut:
            peers = {str(one) for one in self.guarded.take_to_cut()}
            self._host.after(CUT_S, self._close_connections, peers)

    def _close_connections(self, peers: set[str]) -> None:
        for connection in [one for one in self._host.connections if one.peer.removeprefix("ipv4:") in peers]:
            self.gone(connection)
            self._host.hang_up(connection)

    def _take(self, connection: Connection, message: Generate) -> None:
        """A call has come. Its message is noted, counted and decoded."""
        now, peer = self._host.timeline.now, connection.peer
        if not self.guarded.call(peer, has_key=False, now=now):
            return
        self._cut()
        lease = self.ledger.open(peer, peer.split(":")[1])
        lease.is_guest = not self._peers.note(peer, accepts=self.overload.takes_connection())
        one = self._arrived[connection] = _Arrived(self, connection, message, lease)
        costly = message.costly
        digest = request_digest("", message.request.request_id.encode()) if costly is None else costly.digest
        try:
            one.reading = self.poison_watch.begin(digest)
            one.reading.suspect(message.num_routers_lost)
            lease.take(0 if costly is None else len(costly.data))
        except HoldfastError as error:
            self.refuse(one, error)
            return
        if self._resident_bytes > MACHINE_BYTES:
            self._journal.note_own_fault()
            self._host.end(End.NO_MEMORY)
            return
        if costly is None:
            self._admit(one, None)
            return
        if costly.end is not None:
            if costly.end is End.NO_MEMORY:
                self._journal.note_own_fault()
            self._host.end(costly.end)
            return
        self._decode(one)

    def _decode(self, one: _Arrived) -> None:
        costly, now = one.message.costly, self._host.timeline.now
        assert costly is not None, "others are not decoded"
        decoding = self._settings.decoder.decoding(costly)
        self.longest_decoding_s = max(self.longest_decoding_s, _total_s(decoding))
        if len(costly.data) <= INLINE_BYTES:
            self._host.go_on(_total_s(decoding), partial(self._decoded, one, decoding))
            return
        begin_s = max(now, self._decoding_s)
        self._decodings.append((begin_s + decoding.shared_s, begin_s + _total_s(decoding)))
        self._decoding_s = begin_s + _total_s(decoding)
        self._host.after(self._decoding_s - now, self._decoded, one, decoding)

    def _decoded(self, one: _Arrived, decoding: Decoding) -> None:
        costly, now = one.message.costly, self._host.timeline.now
        assert costly is not None, "others are not decoded"
        if self._arrived.get(one.connection) is one:
            one.built_bytes = decoding.built_bytes
            if decoding.error is None and costly.compile_s:
                done_s = self._threads.done_s(now, costly.compile_s)
                self._host.after(done_s - now, self._admit, one, decoding)
            else:
                self._admit(one, decoding)

    def _admit(self, one: _Arrived, decoding: Decoding | None) -> None:
        message = one.message
        if self._arrived.get(one.connection) is not one:
            return  # it was ended, or its client has gone
        try:
            if decoding is not None and decoding.error is not None:
                raise decoding.error
            self.overload.check_new(
                message.request.priority,
                is_resumed=message.resume is not None,
                now=self._host.timeline.now,
                is_guest=one.lease.is_guest,
            )
            one.call = self._host.open(one.connection, message)
        except HoldfastError as error:
            self.refuse(one, error)
            return
        assert one.reading is not None, "it has been read"
        one.reading.admitted()
        one.lease.give_back()
        one.built_bytes = 0
        one.lease.endings[:] = [one.call]

    def refuse(self, one: _Arrived, error: HoldfastError) -> None:
        """Answers a call that is not admitted."""
        self._forget(one, is_cleared=True)
        self._host.refuse(one.connection, one.message, error)

    def gone(self, connection: Connection) -> None:
        """A call is over, or its client has gone."""
        self._num_pending.pop(connection, None)
        if (one := self._arrived.get(connection)) is not None:
            self._forget(one, is_cleared=False)

    def _forget(self, one: _Arrived, *, is_cleared: bool) -> None:
        self._arrived.pop(one.connection, None)
        if one.reading is not None:
            one.reading.end(is_cleared=is_cleared)
        one.lease.endings.clear()
        one.lease.close()


def _total_s(decoding: Decoding) -> float:
    return decoding.shared_s + decoding.held_s

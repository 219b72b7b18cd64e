"""Simulated process: it can be started, killed, frozen and thawed, and has a separate clock."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from holdfast.cluster.simulate.kernel.network import KEEPALIVE_S, Connection, Network
from holdfast.cluster.simulate.kernel.timeline import EventLoop, Timeline
from holdfast.worker.replica.hang_verdict import BEAT, HangVerdict, InputSigns, beat_every_s, look_every_s


class Watched(Protocol):
    """A process as its supervisor sees it, and the process's own timer."""

    num_lives: int
    is_up: bool

    @property
    def computed_s(self) -> float:
        """CPU time of all of its threads so far."""

    def after(self, delay_s: float, action: Callable[..., None]) -> None: ...


class SimulatedHangSupervisor:
    """Hang supervisor of one life of a process."""

    def __init__(self, process: Watched, timeline: Timeline, limit_s: float, on_hang: Callable[[], None]) -> None:
        self._process = process
        self._timeline = timeline
        self._limit_s = limit_s
        self._on_hang = on_hang
        self._life = process.num_lives
        self._verdict = HangVerdict(limit_s)
        self._input_signs = InputSigns(limit_s)
        self._news = b""
        self._beat()
        self._timeline.after(look_every_s(limit_s), self._look)

    def note_input(self, num_bytes: int) -> None:
        """The process says that work on input of this size begins."""
        self._news += self._input_signs.of(num_bytes, self._timeline.now)

    def __str__(self) -> str:
        return f"{self._process}, hang supervisor:"

    def _beat(self) -> None:
        self._news += BEAT
        self._process.after(beat_every_s(self._limit_s), self._beat)

    def _look(self) -> None:
        process = self._process
        if not process.is_up or process.num_lives != self._life:
            return
        news, self._news = self._news, b""
        if self._verdict.look(news, process.computed_s, is_traced=False, now=self._timeline.now):
            self._on_hang()
        else:
            self._timeline.after(look_every_s(self._limit_s), self._look)


class Process:
    """One simulated process. Subclasses implement `on_start`, `on_message`, `on_closed` and `on_hang`."""

    def __init__(self, site: str, network: Network, hangs_after_s: float | None = None) -> None:
        """`on_hang` is called when its hang supervisor, whose limit is `hangs_after_s`, finds that it hangs. None: it
        has no hang supervisor.
        """
        self.site = site
        self.network = network
        self.timeline = network.timeline
        self.is_up = False
        self.is_frozen = False
        self.num_lives = 0
        """Number of starts; events scheduled before the latest start are dropped."""
        self.clock_offset_s = 0.0
        self.connections: dict[Connection, None] = {}
        self.loop = EventLoop(self, network.timeline)
        self.hang_supervisor: SimulatedHangSupervisor | None = None
        self._hangs_after_s = hangs_after_s
        self._num_freezes = 0

    @property
    def clock(self) -> float:
        """The time as this process sees it."""
        return self.timeline.now + self.clock_offset_s

    @property
    def has_backlog(self) -> bool:
        """Whether something has come in while it was frozen or busy."""
        return self.loop.has_waiting

    @property
    def computed_s(self) -> float:
        """CPU time so far, of all lives; a frozen process computes nothing."""
        return self.loop.ran_s

    # --- for subclasses ---

    def on_start(self) -> None:
        """A life begins; nothing is left of the one before."""

    def on_message(self, connection: Connection, message: Any) -> None: ...

    def on_closed(self, connection: Connection) -> None:
        """The other side has gone, and `connections` has forgotten it."""

    def on_hang(self) -> None:
        """Called when the hang supervisor finds that the process hangs."""

    def cost_s(self, message: Any) -> float:
        """Seconds that the event loop is busy with a message."""
        return 0.0

    def check_integrity(self) -> None:
        """Asserts that its books agree with each other."""

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Schedules something that this life does: late if frozen then, never if dead."""
        self.timeline.after(delay_s, self._due, self.num_lives, action, args)

    def connect(self, path_to: str, peer: "Process") -> Connection:
        """Dials a peer, which hears of it with the first message."""
        connection = Connection(self.network, self.network.path(self.site, path_to), (self, peer))
        self.connections[connection] = None
        return connection

    # --- faults ---

    def start(self) -> None:
        """Starts a new life of this process."""
        assert not self.is_up, f"{self} is up already"
        self.is_up, self.is_frozen = True, False
        self.num_lives += 1
        if self._hangs_after_s is not None:
            self.hang_supervisor = SimulatedHangSupervisor(self, self.timeline, self._hangs_after_s, self.on_hang)
        self.on_start()

    def kill(self) -> None:
        """SIGKILL: the system closes its connections."""
        if self.is_up:
            for connection in self._die():
                connection.close(self)

    def vanish(self) -> None:
        """The machine is gone: its peers get no message, and find out by themselves."""
        if self.is_up:
            for connection in self._die():
                connection.abandon(self)

    def freeze(self) -> None:
        """SIGSTOP: whatever comes in waits, and peers that get no answer to their pings give up."""
        if self.is_up and not self.is_frozen:
            self.is_frozen = True
            self.loop.pause()
            self._num_freezes += 1
            self.timeline.after(KEEPALIVE_S, self._give_up, self._num_freezes)

    def thaw(self) -> None:
        """SIGCONT: delayed events happen now, in order."""
        if self.is_frozen:
            self.is_frozen = False
            self.loop.resume()

    def revive(self) -> None:
        """Starts it unless it is up."""
        if not self.is_up:
            self.start()

    # --- as an endpoint ---

    def receive(self, connection: Connection, message: Any) -> None:
        """Queues the message on the process' event loop; a process that is down refuses the connection."""
        if self.is_up:
            self.connections.setdefault(connection)
            self.loop.call(partial(self._cost_s, connection, message), self.on_message, connection, message)
        else:
            connection.has_broken = False  # nobody listens: the connection is refused
            connection.close(self)

    def closed(self, connection: Connection) -> None:
        if connection in self.connections:
            del self.connections[connection]
            self._do(self.on_closed, connection)

    def hang_up(self, connection: Connection) -> None:
        """Closes a connection."""
        self.connections.pop(connection, None)
        connection.close(self)

    def __str__(self) -> str:
        return self.site

    def _do(self, action: Callable[..., None], *args: Any) -> None:
        self.loop.call(None, action, *args)

    def _cost_s(self, connection: Connection, message: Any) -> float:
        """Cost of a message; one from a connection that was closed since is dropped."""
        return self.cost_s(message) if connection in self.connections else 0.0

    def _due(self, life: int, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.is_up and life == self.num_lives:
            self._do(action, *args)

    def _die(self) -> list[Connection]:
        self.is_up = self.is_frozen = False
        self.loop.reset()
        connections = list(self.connections)
        self.connections.clear()
        return connections

    def _give_up(self, freeze: int) -> None:
        if self.is_frozen and freeze == self._num_freezes:
            for connection in list(self.connections):
                self.timeline.after(0, self.closed, connection)
                connection.abandon(self, after_s=0.0)
            self.timeline.after(KEEPALIVE_S, self._give_up, freeze)


EARLY_S: Final = 1e-6
"""Resolution of the clock: alarms may ring this much early, as asyncio's may. Sums of floats are not exact either."""


class Alarm:
    """A scheduled call, unless it is cancelled. Its user must not read `due`: not every event loop's handle has it."""

    def __init__(self, due: float, callback: Callable[[], object]) -> None:
        self.is_set = True
        self.callback = callback
        self.due = due

    def cancel(self) -> None:
        self.is_set = False


class SettableClock:
    """The clock of one life of a process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._alarms: list[Alarm] = []

    def time(self) -> float:
        return self._process.clock

    def call_at(self, when: float, callback: Callable[[], object], /) -> Alarm:
        alarm = Alarm(when, callback)
        self._alarms = [*(alarm for alarm in self._alarms if alarm.is_set), alarm]
        self._wait_for(alarm)
        return alarm

    def rings_by(self, when: float) -> bool:
        """Whether an alarm is set for then, or for earlier."""
        return any(alarm.is_set and alarm.due <= when for alarm in self._alarms)

    def note_set(self) -> None:
        """The process's clock was set: schedules every alarm anew."""
        for alarm in self._alarms:
            self._wait_for(alarm)

    def _wait_for(self, alarm: Alarm) -> None:
        left_s = alarm.due - self.time()
        self._process.after(max(EARLY_S, left_s - EARLY_S), self._ring, alarm)

    def _ring(self, alarm: Alarm) -> None:
        is_due = self.time() >= alarm.due - 2 * EARLY_S  # it is not if the clock was set back
        if alarm.is_set and is_due:
            alarm.cancel()
            alarm.callback()

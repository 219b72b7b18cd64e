"""Simulated network: connections that keep the order of their messages, over paths that are late or cut.

Between two sites there is one `Path`; all connections over it share its faults. A connection behaves like a gRPC
stream: each message arrives once and in order; when it breaks, each side learns of it once, at its own time, and
messages in transit may be lost. Messages on different connections overtake each other.
"""

import random
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Protocol

from holdfast.cluster.simulate.kernel.timeline import Timeline

KEEPALIVE_S: Final = 6.0
"""Silence after which a peer is given up: the router's `keepalive_s` and `keepalive_timeout_s` together."""


class _End(Enum):
    """The last thing that a connection carries."""

    END = "the end"

    def __str__(self) -> str:
        return self.value


_END: Final = _End.END


class Endpoint(Protocol):
    """One side of a connection."""

    def receive(self, connection: "Connection", message: Any) -> None:
        """Takes a message that has arrived on `connection`."""
        ...

    def closed(self, connection: "Connection") -> None:
        """The connection is over; called once, and not on the side that closed it."""


@dataclass(slots=True, kw_only=True)
class Path:
    """Connection state between two sites."""

    latency_s: float
    slowness: float = 1.0
    """Factor on the latency; 1 on a good day."""
    block: int = 0
    """Number of the partition that is on, or 0."""
    connections: dict["Connection", None] = field(default_factory=dict)
    """Connections with at least one open side, oldest first."""


class Network:
    """All paths and connections."""

    def __init__(self, timeline: Timeline, rng: random.Random, latency_s: float) -> None:
        self.timeline = timeline
        self.rng = rng
        self._latency_s = latency_s
        self._paths: dict[tuple[str, str], Path] = {}
        self._num_blocks = 0
        self.num_connections = 0

    def path(self, one: str, other: str) -> Path:
        """The path between two sites, in either direction."""
        key = (one, other) if one < other else (other, one)
        if key not in self._paths:
            self._paths[key] = Path(latency_s=self._latency_s * self.rng.uniform(0.5, 1.5))
        return self._paths[key]

    def block(self, path: Path) -> None:
        """Blocks the path: no messages pass. Both sides give up a connection that stays silent for too long."""
        self._num_blocks += 1
        path.block = self._num_blocks
        self.timeline.after(KEEPALIVE_S, self._give_up, path, self._num_blocks)

    def heal(self, path: Path) -> None:
        """The path works again, and delayed messages continue."""
        path.block, path.slowness = 0, 1.0
        for connection in list(path.connections):
            connection.resume()

    def _give_up(self, path: Path, block: int) -> None:
        if path.block == block:
            for connection in list(path.connections):
                connection.has_broken = False
                connection.cut(loses=True)
            self.timeline.after(KEEPALIVE_S, self._give_up, path, block)


class Connection:
    """A stream of messages each way between two endpoints; `ends[0]` has opened it."""

    def __init__(self, network: Network, path: Path, ends: tuple[Endpoint, Endpoint], host: str = "10.0.0.1") -> None:
        """`host`: the IPv4 address of the side that has opened it."""
        self.ends = ends
        network.num_connections += 1
        self.peer = f"ipv4:{host}:{network.num_connections % 2**16}"
        """The side that has opened it, as gRPC names it."""
        self.has_broken = True
        """When it has ended: not because it was refused, or pings were not answered."""
        self._timeline = network.timeline
        self._rng = network.rng
        self._path = path
        self._is_open = [True, True]
        self._has_lost = False
        self._last_arrival = [0.0, 0.0]
        self._held: list[tuple[int, Any]] = []
        path.connections[self] = None

    def send(self, sender: Endpoint, message: Any) -> None:
        """Puts a message on its way, unless the sender's side is closed."""
        side = self._side(sender)
        if self._is_open[side]:
            self._carry(1 - side, message)

    def close(self, closer: Endpoint) -> None:
        """Hangs up. The other side learns of it after all earlier messages."""
        side = self._side(closer)
        if self._is_open[side]:
            self._end(side)
            self._carry(1 - side, _END)

    def cut(self, *, loses: bool) -> None:
        """The connection breaks. With `loses`, messages in transit are lost; otherwise they still arrive."""
        self._has_lost = self._has_lost or loses
        self._held.clear()
        for side in (0, 1):
            self._schedule(side, _END)

    def abandon(self, lost: Endpoint, after_s: float = KEEPALIVE_S) -> None:
        """The side of `lost` has gone without a word: the other one gives up when its pings are not answered."""
        side = self._side(lost)
        self._has_lost, self.has_broken = True, False
        self._end(side)
        self._timeline.after(after_s, self._schedule, 1 - side, _END)

    def resume(self) -> None:
        """The path works again: delivers the delayed messages."""
        held, self._held = self._held, []
        for side, message in held:
            self._schedule(side, message)

    def __str__(self) -> str:
        return f"{self.ends[0]} - {self.ends[1]}"

    def _side(self, end: Endpoint) -> int:
        return 0 if end is self.ends[0] else 1

    def _carry(self, to: int, message: Any) -> None:
        if self._path.block:
            self._held.append((to, message))
        else:
            self._schedule(to, message)

    def _schedule(self, to: int, message: Any) -> None:
        latency_s = self._path.latency_s * self._path.slowness * (0.5 + self._rng.random())
        arrival = max(self._last_arrival[to], self._timeline.now + latency_s)
        self._last_arrival[to] = arrival
        self._timeline.at(arrival, self._arrive, to, message)

    def _arrive(self, to: int, message: Any) -> None:
        if not self._is_open[to]:
            return
        if message is _END:
            self._end(to)
            self.ends[to].closed(self)
        elif not self._has_lost:
            self.ends[to].receive(self, message)

    def _end(self, side: int) -> None:
        self._is_open[side] = False
        if not any(self._is_open):
            self._path.connections.pop(self, None)

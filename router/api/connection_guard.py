"""Connection guard of a router: the connections of its APIs, and the task that closes those beyond their budgets."""

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Final

from holdfast.router.security.connection_budgets import (
    BudgetLimits,
    ClientConnection,
    GuardedConnections,
    Peer,
    Reason,
    peer,
)

DESCRIPTORS: Final = "/proc/self/fd"


def num_descriptors() -> int:
    """Number of open files of this process: at least the number of its connections, and quick to count."""
    return len(os.listdir(DESCRIPTORS))


def accepted(ports: Collection[int]) -> set[Peer]:
    """Peers of all connections that came to these ports of this process."""
    peers = set()
    for connection, caller in _accepted(ports):
        connection.close()
        peers.add(caller)
    return peers


def cut_off(peers: Collection[Peer], ports: Collection[int]) -> set[Peer]:
    """Closes the connections of these peers to these ports, in both directions and at once. Returns whose it found."""
    found = set()
    for connection, caller in _accepted(ports):
        with connection:
            if caller in peers:
                with suppress(OSError):  # its peer was faster
                    connection.shutdown(socket.SHUT_RDWR)
                found.add(caller)
    return found


def _accepted(ports: Collection[int]) -> Iterator[tuple[socket.socket, Peer]]:
    """Duplicates of the sockets, which the caller closes. A duplicate stays that connection's, also when the
    descriptor's number is used again.
    """
    for name in os.listdir(DESCRIPTORS):
        with suppress(OSError, ValueError):  # it is closed by now, or no connected socket over IP
            if not os.readlink(f"{DESCRIPTORS}/{name}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
            try:
                if duplicate.getsockname()[1] not in ports:
                    raise ValueError
                host, port = duplicate.getpeername()[:2]
                caller = peer(host, port)
            except (OSError, ValueError, IndexError, TypeError):
                duplicate.close()
                continue
            yield duplicate, caller


logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Seconds between counts of connections without calls, where keys are required."""

LOG_S: Final = 10.0
"""Seconds between log lines of one reason."""

GRPC: Final = "grpc"
HTTP: Final = "http"


class ConnectionGuard:
    """Guard of one router's connections, on the running event loop. It closes nothing before `start`, or where nothing
    listens.
    """

    def __init__(self, limits: BudgetLimits, *, asks_for_keys: bool, clock: Callable[[], float] = monotonic) -> None:
        self._guarded = GuardedConnections(limits, asks_for_keys=asks_for_keys, on_cut=partial(self.count, GRPC))
        self.budgets = self._guarded.budgets
        self._limits = limits
        self.now = clock
        self._ports: set[int] = set()
        self._is_wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._num_cut: Counter[tuple[str, str]] = Counter()
        self._logged_at: dict[Reason, float] = {}
        self._num_unlogged: Counter[Reason] = Counter()

    @property
    def num_cut(self) -> Mapping[tuple[str, str], int]:
        """Connections that were closed, by protocol and reason."""
        return self._num_cut

    @property
    def num_resets(self) -> int:
        """Calls that clients have reset within `PREMATURE_S`."""
        return self._guarded.num_resets

    def start(self, port: int) -> None:
        """Guards the connections that come to this port."""
        self._ports.add(port)
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name="connection guard")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # --- gRPC ---

    def call(self, grpc_peer: str, *, has_key: bool) -> bool:
        """A call has begun on this connection. False if the connection is cut off and the call gets no answer."""
        is_served = self._guarded.call(grpc_peer, has_key=has_key, now=self.now())
        if self._guarded.has_work:
            self._is_wanted.set()
        return is_served

    def reset(self, grpc_peer: str, began_at: float) -> None:
        """The client has ended a call of this connection that began then; an empty name: the connection is unknown."""
        self._guarded.reset(grpc_peer, began_at=began_at, now=self.now())
        if self._guarded.has_work:
            self._is_wanted.set()

    # --- HTTP, whose server closes its connections itself ---

    def http_connection(self, host: str, port: int) -> ClientConnection | None:
        """A new connection with this peer; None for a text that is not an IP address."""
        with suppress(ValueError):
            return ClientConnection(peer(host, port), self.now())
        return None

    def http_strangers_overdue(self, connections: Collection[ClientConnection]) -> list[ClientConnection]:
        """The HTTP server's connections to close, since too many have presented no key."""
        overdue = self.budgets.overdue([one for one in connections if not (one.is_known or one.is_cut)])
        for one in overdue:
            self.count(HTTP, one, Reason.CONNECTIONS_WITHOUT_KEY)
        return overdue

    def http_call(self, connection: ClientConnection, *, has_key: bool) -> bool:
        """Notes a request on this connection; returns whether to close it after the answer."""
        reason = self.budgets.call(connection, has_key=has_key, now=self.now())
        if reason is not None:
            self.count(HTTP, connection, reason)
        return reason is not None

    def count(self, protocol: str, connection: ClientConnection, reason: Reason) -> None:
        """Counts and logs a connection that is cut off."""
        connection.is_cut = True
        self._num_cut[protocol, reason] += 1
        now = self.now()
        if now - self._logged_at.get(reason, float("-inf")) < LOG_S:
            self._num_unlogged[reason] += 1
            return
        self._logged_at[reason] = now
        more = self._num_unlogged.pop(reason, 0)
        message = f"; so were {more} others since the last such line" if more else ""
        logger.warning("the %s connection of %s was cut off: %s%s", protocol, connection.peer, reason.words, message)

    # --- inside ---

    async def _keep(self) -> None:
        wait_s = LOOK_S if self.budgets.asks_for_keys else None
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_wanted.wait(), wait_s)
            self._is_wanted.clear()
            if self._guarded.are_many or self._may_be_too_many():
                await self._look()
            if self._guarded.has_to_cut:
                peers = self._guarded.take_to_cut()
                missed = peers - await asyncio.to_thread(cut_off, peers, frozenset(self._ports))
                if missed:  # they are gone, or are tried again
                    await self._look()
                    self._guarded.cut_again(missed)

    def _may_be_too_many(self) -> bool:
        return self.budgets.asks_for_keys and num_descriptors() > self._limits.max_unauthenticated_connections

    async def _look(self) -> None:
        began_at = self.now()
        self._guarded.look(await asyncio.to_thread(accepted, frozenset(self._ports)), began_at)

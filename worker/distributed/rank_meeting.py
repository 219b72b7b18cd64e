"""Meeting of a replica's ranks: who calls whom until each rank has a connection to every other one.

Ranks call the leader and say where they listen themselves; when all have come, the leader tells everyone where the
others are. Nothing listens any more after that.
"""

import json
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.worker.distributed.rendezvous import (
    Caller,
    RankListener,
    Rendezvous,
    call,
    close_all,
    own_address,
    received,
)

ORDER: Final = "order"
PEER: Final = "peer"
MAX_MESSAGE_BYTES: Final = 2**20
_LENGTH: Final = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class Connections:
    """Of one rank to the others, by their ranks."""

    orders: dict[int, socket.socket]
    """Of the leader to all others; of another rank to the leader alone."""
    peers: dict[int, socket.socket]
    """To every other rank."""
    notice: str = ""
    """What the leader had to tell."""


@dataclass(slots=True)
class _Made:
    """Connections of a meeting that may still fail: they are closed then."""

    orders: dict[int, socket.socket] = field(default_factory=dict)
    peers: dict[int, socket.socket] = field(default_factory=dict)

    def close(self) -> None:
        close_all([*self.orders.values(), *self.peers.values()])


def meet(
    rank: int,
    size: int,
    rendezvous: Rendezvous,
    timeout_s: float,
    *,
    listener: RankListener | None = None,
    notice: Callable[[], str] = str,
) -> Connections:
    """Connects this rank to the others of its replica. Blocking; all ranks call it.

    The leader may bring a `listener` that is open already, which is closed then, and a `notice` for the others. Raises
    OSError or TimeoutError when not all are connected after `timeout_s`.
    """
    with ExitStack() as stack:
        made = _Made()
        unless_met = stack.enter_context(ExitStack())
        unless_met.callback(made.close)
        if rank == 0:
            listener = stack.enter_context(listener or RankListener(rendezvous.host, rendezvous.port))
            said = _lead(size, rendezvous, listener, timeout_s, made, notice)
        else:
            said = _follow(rank, size, rendezvous, timeout_s, made)
        unless_met.pop_all()
        return Connections(made.orders, made.peers, said)


def _lead(
    size: int,
    rendezvous: Rendezvous,
    listener: RankListener,
    timeout_s: float,
    made: _Made,
    notice: Callable[[], str],
) -> str:
    others = range(1, size)
    callers = listener.accept([Caller(ORDER, rank) for rank in others], rendezvous.secret, timeout_s)
    made.orders.update(sorted((caller.rank, connection) for caller, connection in callers.items()))
    addresses = {}
    for rank, connection in made.orders.items():
        connection.settimeout(timeout_s)
        addresses[rank] = _receive(connection)
    said = notice()
    for connection in made.orders.values():
        _send(connection, {"addresses": [addresses[rank] for rank in others], "notice": said})
    callers = listener.accept([Caller(PEER, rank) for rank in others], rendezvous.secret, timeout_s)
    made.peers.update(sorted((caller.rank, connection) for caller, connection in callers.items()))
    return said


def _follow(rank: int, size: int, rendezvous: Rendezvous, timeout_s: float, made: _Made) -> str:
    secret, leader = rendezvous.secret, (rendezvous.host, rendezvous.port)
    made.orders[0] = call(*leader, Caller(ORDER, rank), secret, timeout_s)
    made.orders[0].settimeout(timeout_s)
    host = own_address(*leader)
    with RankListener(host) as listener:
        _send(made.orders[0], [host, listener.port])
        told = _receive(made.orders[0])
        lower = [leader, *told["addresses"][: rank - 1]]
        for peer, (host, port) in enumerate(lower):
            made.peers[peer] = call(host, port, Caller(PEER, rank), secret, timeout_s)
        higher = [Caller(PEER, peer) for peer in range(rank + 1, size)]
        callers = listener.accept(higher, secret, timeout_s)
        made.peers.update(sorted((caller.rank, connection) for caller, connection in callers.items()))
    return str(told["notice"])


def _send(connection: socket.socket, message: object) -> None:
    text = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def _receive(connection: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(received(connection, _LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a rank's message of {length} bytes is longer than {MAX_MESSAGE_BYTES}")
    return json.loads(received(connection, length))

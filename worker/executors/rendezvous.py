"""Rendezvous of a replica's ranks: who calls whom until each rank has a connection to every other one.

Ranks call the leader and say where they listen themselves; when all have come, the leader tells everyone where the
others are. Stops listening. Both ends of each connection prove by HMAC that they know the replica's
secret, which itself is never sent.
"""

import hashlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final, Self

HELLO_TIMEOUT_S: Final = 5.0
"""A caller that has not sent its hello after so long is no rank, or calls again."""

MAX_CALLERS: Final = 64
"""Most callers that have not sent their hello yet; above it the oldest one is closed."""

_RETRY_S: Final = 0.05
_NONCE_BYTES: Final = 32
_HELLO: Final = struct.Struct(f"!i{_NONCE_BYTES}s32s")
"""Rank, nonce and proof of a caller."""

_LENGTH: Final = struct.Struct("!I")
_MAX_MESSAGE_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Address that the leader of a replica listens on, and the secret of that replica."""

    host: str
    port: int
    secret: str = field(repr=False)
    """Known to the ranks of one start of one replica alone."""

    @classmethod
    def at(cls, host: str, port: int) -> Self:
        """A rendezvous with a new secret."""
        return cls(host=host, port=port, secret=secrets.token_hex(32))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(slots=True)
class Connections:
    """Connections of one rank to the others."""

    peers: dict[int, socket.socket] = field(default_factory=dict)
    """Sockets by rank, in order."""
    notice: str = ""
    """Message of the leader."""

    def close(self) -> None:
        for connection in self.peers.values():
            connection.close()


def meet(
    rank: int,
    size: int,
    rendezvous: Rendezvous,
    timeout_s: float,
    *,
    listener: "RankListener | None" = None,
    notice: Callable[[], str] = str,
) -> Connections:
    """Connects this rank to the others of its replica. Blocking; all ranks call it.

    The leader may bring a `listener` that is open already, which is closed then, and a `notice` for the others, which
    is asked for when all have come. Raises OSError or TimeoutError when not all are connected after `timeout_s`.
    """
    made = Connections()
    try:
        if rank == 0:
            with listener or RankListener(rendezvous.host, rendezvous.port) as listening:
                _lead(size, rendezvous, listening, timeout_s, made, notice)
        else:
            _follow(rank, size, rendezvous, timeout_s, made)
    except BaseException:
        made.close()
        raise
    return made


def _lead(
    size: int,
    rendezvous: Rendezvous,
    listener: "RankListener",
    timeout_s: float,
    made: Connections,
    notice: Callable[[], str],
) -> None:
    made.peers.update(listener.accept(range(1, size), rendezvous.secret, timeout_s))
    addresses = []
    for connection in made.peers.values():
        connection.settimeout(timeout_s)
        addresses.append(_receive(connection))
    made.notice = notice()
    for connection in made.peers.values():
        _send(connection, {"addresses": addresses, "notice": made.notice})


def _follow(rank: int, size: int, rendezvous: Rendezvous, timeout_s: float, made: Connections) -> None:
    secret, leader = rendezvous.secret, (rendezvous.host, rendezvous.port)
    made.peers[0] = call(*leader, rank, secret, timeout_s)
    made.peers[0].settimeout(timeout_s)
    host = own_address(*leader)
    with RankListener(host) as listener:
        _send(made.peers[0], [host, listener.port])
        message = _receive(made.peers[0])
        for peer, (host, port) in enumerate(message["addresses"][: rank - 1], 1):
            made.peers[peer] = call(host, port, rank, secret, timeout_s)
        made.peers.update(listener.accept(range(rank + 1, size), secret, timeout_s))
    made.notice = str(message["notice"])


def _send(connection: socket.socket, message: object) -> None:
    text = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def _receive(connection: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_received(connection, _LENGTH.size))
    if length > _MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a rank's message of {length} bytes is longer than {_MAX_MESSAGE_BYTES}")
    return json.loads(_received(connection, length))


class RankListener:
    """A listening socket of a rank, on one address. It hands out connections of ranks that know the secret."""

    def __init__(self, host: str, port: int = 0) -> None:
        """Raises OSError for an address that is not this machine's, or a port that is taken."""
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        self._socket.setblocking(False)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def accept(self, wanted: Collection[int], secret: str, timeout_s: float) -> dict[int, socket.socket]:
        """A connection from each `wanted` rank, in their order. Others are closed, whatever they send or do not send.

        Raises TimeoutError when a rank has not come after `timeout_s`.
        """
        with selectors.DefaultSelector() as selector:
            arrivals = _Arrivals(self._socket, selector, wanted, secret)
            try:
                arrivals.collect(time.monotonic() + timeout_s)
            except BaseException:
                for connection in arrivals.found.values():
                    connection.close()
                raise
            finally:
                arrivals.close()
            return {rank: arrivals.found[rank] for rank in wanted}

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class _Arrival:
    """A connection that has not shown its hello."""

    challenge: bytes
    until_s: float
    received: bytes = b""


class _Arrivals:
    """Callers of one listener, read side by side: a silent, slow or closed one holds up no other."""

    def __init__(
        self, listener: socket.socket, selector: selectors.BaseSelector, wanted: Collection[int], secret: str
    ) -> None:
        self.found: dict[int, socket.socket] = {}
        self._listener, self._selector, self._wanted, self._secret = listener, selector, wanted, secret
        self._open: dict[socket.socket, _Arrival] = {}
        selector.register(listener, selectors.EVENT_READ)

    def collect(self, end_s: float) -> None:
        while len(self.found) < len(self._wanted):
            now_s = time.monotonic()
            if now_s >= end_s:
                missing = [rank for rank in self._wanted if rank not in self.found]
                raise TimeoutError(f"rank {', '.join(map(str, missing))} did not come in time")
            self._expire(now_s)
            until_s = min([end_s, *(arrival.until_s for arrival in self._open.values())])
            for key, _ in self._selector.select(max(0.0, until_s - now_s)):
                if key.fileobj is self._listener:
                    self._admit()
                elif key.fileobj in self._open:
                    self._read(key.fileobj)

    def close(self) -> None:
        for connection in list(self._open):
            self._drop(connection)

    def _admit(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the caller is gone already
            return
        arrival = _Arrival(secrets.token_bytes(_NONCE_BYTES), time.monotonic() + HELLO_TIMEOUT_S)
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        self._open[connection] = arrival
        if len(self._open) > MAX_CALLERS:
            self._drop(next(iter(self._open)))
        try:
            connection.send(arrival.challenge)  # fits the buffer of a new connection
        except OSError:
            self._drop(connection)

    def _read(self, connection: socket.socket) -> None:
        arrival = self._open[connection]
        try:
            part = connection.recv(_HELLO.size - len(arrival.received))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        arrival.received += part
        if not part:
            self._drop(connection)
        elif len(arrival.received) == _HELLO.size:
            self._judge(connection, arrival)

    def _judge(self, connection: socket.socket, arrival: _Arrival) -> None:
        rank, nonce, proof = _HELLO.unpack(arrival.received)
        claimed = _claim(rank, arrival.challenge, nonce)
        is_known = hmac.compare_digest(proof, _proof(self._secret, b"call", claimed))
        if not is_known or rank not in self._wanted or rank in self.found:
            self._drop(connection)
            return
        try:
            connection.send(_proof(self._secret, b"answer", claimed))
        except OSError:
            self._drop(connection)
            return
        self._selector.unregister(connection)
        del self._open[connection]
        connection.setblocking(True)
        self.found[rank] = connection

    def _expire(self, now_s: float) -> None:
        for connection, arrival in list(self._open.items()):
            if arrival.until_s <= now_s:
                self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        del self._open[connection]
        self._selector.unregister(connection)
        connection.close()


def call(host: str, port: int, rank: int, secret: str, timeout_s: float) -> socket.socket:
    """This rank's connection to the listener of another one, which has shown that it knows the secret too.

    Connects again where no peer listens yet, or the connection is lost in the handshake. Raises TimeoutError after
    `timeout_s`, PermissionError where the other end does not know the secret.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            return _call_once(host, port, rank, secret, end_s - time.monotonic())
        except PermissionError:
            raise
        except OSError as error:
            if time.monotonic() + _RETRY_S >= end_s:
                raise TimeoutError(f"no peer answered at {host}:{port} ({error})") from error
            time.sleep(_RETRY_S)


def _call_once(host: str, port: int, rank: int, secret: str, timeout_s: float) -> socket.socket:
    connection = socket.create_connection((host, port), max(_RETRY_S, timeout_s))
    try:
        challenge, nonce = _received(connection, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        claimed = _claim(rank, challenge, nonce)
        connection.sendall(_HELLO.pack(rank, nonce, _proof(secret, b"call", claimed)))
        expected = _proof(secret, b"answer", claimed)
        if not hmac.compare_digest(_received(connection, len(expected)), expected):
            raise PermissionError(f"what listens at {host}:{port} does not know the replica's secret")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def own_address(host: str, port: int) -> str:
    """The address of this machine that a packet to `host` would leave from. Sends nothing."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _received(connection: socket.socket, count: int) -> bytes:
    """The next `count` bytes. Raises OSError where the other end closes before."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionResetError("the other end has closed the connection")
        parts += part
    return bytes(parts)


def _claim(rank: int, challenge: bytes, nonce: bytes) -> bytes:
    return struct.pack("!i", rank) + challenge + nonce


def _proof(secret: str, side: bytes, claim: bytes) -> bytes:
    return hmac.digest(secret.encode(), side + b"\0" + claim, hashlib.sha256)

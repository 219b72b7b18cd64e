"""Rendezvous of a replica's ranks: where the leader listens, and the handshake that shows who knows the secret.

Both ends of each connection between ranks prove by HMAC that they know the replica's secret, which itself is never
sent.
"""

import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

HELLO_TIMEOUT_S: Final = 5.0
"""A caller that has not sent its hello after so long is no rank, or calls again."""

MAX_CALLERS: Final = 64
"""Callers that have not sent their hello yet; beyond so many the oldest one is closed."""

_RETRY_S: Final = 0.05
_NONCE_BYTES: Final = 32
_HELLO: Final = struct.Struct(f"!8si{_NONCE_BYTES}s32s")
"""Purpose, rank, nonce and proof of a caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the leader of a replica listens, and the secret of that replica."""

    host: str
    port: int
    secret: str = field(repr=False)
    """Known to the ranks of one start of one replica alone."""

    @classmethod
    def at(cls, host: str, port: int) -> Self:
        """With a new secret."""
        return cls(host=host, port=port, secret=secrets.token_hex(32))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Caller(NamedTuple):
    """What a connection is for, and the rank at its other end."""

    purpose: str
    """At most 8 ASCII characters."""
    rank: int


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

    def accept(self, wanted: Collection[Caller], secret: str, timeout_s: float) -> dict[Caller, socket.socket]:
        """A connection from each caller that is `wanted`. Others are closed, whatever they send or do not send.

        Raises TimeoutError when a caller has not come after `timeout_s`.
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
            return arrivals.found

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
    """Callers of one listener, read side by side: one that is silent, slow or gone holds up no other."""

    def __init__(
        self, listener: socket.socket, selector: selectors.BaseSelector, wanted: Collection[Caller], secret: str
    ) -> None:
        self.found: dict[Caller, socket.socket] = {}
        self._listener, self._selector, self._wanted, self._secret = listener, selector, wanted, secret
        self._open: dict[socket.socket, _Arrival] = {}
        selector.register(listener, selectors.EVENT_READ)

    def collect(self, end_s: float) -> None:
        while len(self.found) < len(self._wanted):
            now_s = time.monotonic()
            if now_s >= end_s:
                missing = sorted({caller.rank for caller in self._wanted if caller not in self.found})
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
        purpose, rank, nonce, proof = _HELLO.unpack(arrival.received)
        claimed = _claim(purpose, rank, arrival.challenge, nonce)
        caller = Caller(purpose.rstrip(b"\0").decode("ascii", "replace"), rank)
        is_known = hmac.compare_digest(proof, _proof(self._secret, b"call", claimed))
        if not is_known or caller not in self._wanted or caller in self.found:
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
        self.found[caller] = connection

    def _expire(self, now_s: float) -> None:
        for connection, arrival in list(self._open.items()):
            if arrival.until_s <= now_s:
                self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        del self._open[connection]
        self._selector.unregister(connection)
        connection.close()


def call(host: str, port: int, caller: Caller, secret: str, timeout_s: float) -> socket.socket:
    """A connection to a listener of another rank, which has shown that it knows the secret too.

    Calls again where nobody listens yet, or the connection is lost in the handshake. Raises TimeoutError after
    `timeout_s`, PermissionError where the other end does not know the secret.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            return _call_once(host, port, caller, secret, end_s - time.monotonic())
        except PermissionError:
            raise
        except OSError as error:
            if time.monotonic() + _RETRY_S >= end_s:
                raise TimeoutError(f"no peer answered at {host}:{port} ({error})") from error
            time.sleep(_RETRY_S)


def _call_once(host: str, port: int, caller: Caller, secret: str, timeout_s: float) -> socket.socket:
    connection = socket.create_connection((host, port), max(_RETRY_S, timeout_s))
    try:
        challenge, nonce = received(connection, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        purpose = caller.purpose.encode().ljust(8, b"\0")
        claimed = _claim(purpose, caller.rank, challenge, nonce)
        connection.sendall(_HELLO.pack(purpose, caller.rank, nonce, _proof(secret, b"call", claimed)))
        expected = _proof(secret, b"answer", claimed)
        if not hmac.compare_digest(received(connection, len(expected)), expected):
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


def received(connection: socket.socket, count: int) -> bytes:
    """The next `count` bytes. Raises OSError where the other end closes before."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionResetError("the other end has closed the connection")
        parts += part
    return bytes(parts)


def _claim(purpose: bytes, rank: int, challenge: bytes, nonce: bytes) -> bytes:
    return purpose + struct.pack("!i", rank) + challenge + nonce


def _proof(secret: str, side: bytes, claim: bytes) -> bytes:
    return hmac.digest(secret.encode(), side + b"\0" + claim, hashlib.sha256)


def close_all(connections: Collection[socket.socket]) -> None:
    for connection in connections:
        with suppress(OSError):
            connection.close()

"""Direct TCP connections between the ranks of one replica, for the small messages of decoding on CPUs.

The all-reduce of one decoded token is a few hundred bytes, and there are two in every layer. gloo hands each message to
threads of its own, which have to be woken on both sides; a blocking send and receive on the calling thread needs none.
Large messages, where bandwidth counts, stay with gloo. What may not live here: sums (`tensor_parallel.py`).
"""

import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

LARGEST_BYTES: Final = 2**16
"""Fits the kernel's buffers on both sides, so that all ranks may send before any receives."""

_BUFFER_BYTES: Final = 2 * LARGEST_BYTES
_TOKEN_BYTES: Final = 16
_HELLO: Final = struct.Struct(f"!i{_TOKEN_BYTES}s")


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and how the ranks of a group find each other. `host` and `port` are those of the rendezvous: the address
    that reaches it is the one to listen at.
    """

    rank: int
    size: int
    store: Store
    host: str
    port: int
    timeout_s: float


def connect(meeting: Meeting, name: str, *, calls: Sequence[int], num_callers: int) -> dict[int, socket.socket]:
    """Connections by rank: to those that this rank `calls`, and from those that call it. Both sides use one `name`.

    Raises OSError, a RuntimeError or TimeoutError when not all are connected after the timeout.
    """
    rank, store, timeout_s = meeting.rank, meeting.store, meeting.timeout_s
    if rank == 0:
        store.set(f"{name}-token", secrets.token_hex(_TOKEN_BYTES // 2))
    token = store.get(f"{name}-token")
    with socket.create_server((_own_address(meeting.host, meeting.port), 0)) as server:
        server.settimeout(timeout_s)
        store.set(f"{name}-{rank}", "{}:{}".format(*server.getsockname()))
        peers = {peer: _call(store.get(f"{name}-{peer}").decode(), rank, token, timeout_s) for peer in calls}
        while len(peers) < len(calls) + num_callers:
            peer, connection = _answer(server, token, timeout_s)
            if rank < peer < meeting.size:
                peers[peer] = connection
    return peers


class PeerSockets:
    """One connection to every other rank. Made by all ranks together."""

    def __init__(self, meeting: Meeting) -> None:
        """Raises as `connect` does."""
        higher = meeting.size - 1 - meeting.rank
        self._peers = connect(meeting, "peer", calls=range(meeting.rank), num_callers=higher)

    def exchange(self, x: Tensor) -> list[Tensor]:
        """Every rank's `x`, in rank order. `x` is contiguous, on the CPU, of the same shape on all ranks, and small.

        Raises OSError when a peer is gone, or silent for longer than the timeout.
        """
        mine = _bytes_of(x)
        assert len(mine) <= LARGEST_BYTES, "all ranks send first: what they send must fit the kernel's buffers"
        for connection in self._peers.values():
            connection.sendall(mine)
        parts = [x] * (len(self._peers) + 1)
        for peer, connection in self._peers.items():
            part = torch.empty_like(x)
            theirs = _bytes_of(part)
            if connection.recv_into(theirs, len(theirs), socket.MSG_WAITALL) != len(theirs):
                raise ConnectionResetError(f"rank {peer} has closed its connection")
            parts[peer] = part
        return parts

    def close(self) -> None:
        for connection in self._peers.values():
            connection.close()


def _bytes_of(x: Tensor) -> memoryview:
    return x.view(-1).view(torch.uint8).numpy().data


def _own_address(host: str, port: int) -> str:
    """The address of this machine that a packet to the rendezvous would leave from. Sends nothing."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _call(address: str, rank: int, token: bytes, timeout_s: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout_s)
    _tune(connection, timeout_s)
    connection.sendall(_HELLO.pack(rank, token))
    return connection


def _answer(server: socket.socket, token: bytes, timeout_s: float) -> tuple[int, socket.socket]:
    """The next caller's rank and connection; -1 for a caller without the token, whose connection is closed."""
    connection, _ = server.accept()
    _tune(connection, timeout_s)
    hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
    rank, shown = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (-1, b"")
    if not secrets.compare_digest(shown, token):
        connection.close()
        return -1, connection
    return rank, connection


def _tune(connection: socket.socket, timeout_s: float) -> None:
    """Blocking calls that the kernel ends: Python's own timeouts would cost a poll before each."""
    connection.settimeout(None)
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

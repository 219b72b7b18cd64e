"""Direct TCP connections between the ranks of one replica, for the leader's orders and for activations on CPUs.

The all-reduce of one decoded token is a few hundred bytes, and there are two in every layer. A library with separate
threads would have to wake them on both sides for each message; a blocking send and receive on the calling thread needs
none. Each message begins with the kind, number and size of its collective: ranks that are out of step fail, and never
add sums of different collectives, nor run an invalid command.
"""

import os
import select
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LARGEST_BYTES: Final = 2**16
"""Fits the kernel's buffers on both sides, so that all ranks may send before any receives."""

_BUFFER_BYTES: Final = 2 * LARGEST_BYTES
_HEAD: Final = struct.Struct("=cqq")
"""The kind of a collective, its number, counted from 1, and its bytes."""

_KINDS: Final = {b"x": "exchange", b"o": "order"}
_EXCHANGE, _ORDER = _KINDS
_SPIN_S: Final = 500e-6


class PeerSockets:
    """One connection to every other rank. All ranks make the same calls, in the same order."""

    def __init__(self, connections: Mapping[int, socket.socket], timeout_s: float) -> None:
        """`connections` by rank. An exchange gives up when nothing has moved for `timeout_s`, and so does the leader's
        end of an order.
        """
        self._peers = dict(connections)
        self._timeout_s = timeout_s
        self._number = 0
        self._their_head = memoryview(bytearray(_HEAD.size))
        for connection in self._peers.values():
            _tune(connection, timeout_s)

    @property
    def own_host(self) -> str:
        """Address of this host by which the leader reaches it."""
        host: str = self._peers[0].getsockname()[0]
        return host

    def exchange(self, x: Tensor) -> list[Tensor]:
        """Every rank's `x`, in rank order. `x` is contiguous, on the CPU, and of the same shape on all ranks.

        Raises OSError when a peer is gone, silent for longer than the timeout, or at another exchange.
        """
        mine = _bytes_of(x)
        head = self._next_head(_EXCHANGE, len(mine))
        if len(mine) > LARGEST_BYTES:
            return self._exchange_large(x, head, mine)
        for connection in self._peers.values():
            connection.sendall(b"".join((head, mine)))
        parts = [x] * (len(self._peers) + 1)
        their_head = self._their_head
        for peer, connection in self._peers.items():
            part = torch.empty_like(x)
            count = connection.recvmsg_into((their_head, _bytes_of(part)), 0, socket.MSG_WAITALL)[0]
            if count >= _HEAD.size:
                _check_head(peer, their_head, head)
            if count != len(head) + len(mine):
                raise _gone(peer)
            parts[peer] = part
        return parts

    def _exchange_large(self, x: Tensor, head: bytes, mine: memoryview) -> list[Tensor]:
        """Sends to and receives from all peers as their buffers allow: no rank waits for another to receive first."""
        parts = [x if peer not in self._peers else torch.empty_like(x) for peer in range(len(self._peers) + 1)]
        transfers = {
            connection.fileno(): _Transfer(peer, connection, head, mine, _bytes_of(parts[peer]))
            for peer, connection in self._peers.items()
        }
        poll = select.poll()
        for descriptor in transfers:
            poll.register(descriptor, select.POLLIN | select.POLLOUT)
        while transfers:
            ready = poll.poll(self._timeout_s * 1e3)
            if not ready:
                raise TimeoutError(f"no bytes moved between ranks for {self._timeout_s:g} s")
            for descriptor, events in ready:
                wanted = transfers[descriptor].move(events)
                if wanted:
                    poll.modify(descriptor, wanted)
                else:
                    poll.unregister(descriptor)
                    del transfers[descriptor]
        return parts

    def send(self, order: NDArray[np.int64]) -> None:
        """The leader's. Returns once the order is on its way to every rank. Raises OSError when one is gone, or takes
        none for longer than the timeout.
        """
        message = self._next_head(_ORDER, order.nbytes) + order.tobytes()
        for connection in self._peers.values():
            connection.sendall(message)

    def receive(self) -> NDArray[np.int64]:
        """The leader's next order; blocks for however long it takes. Raises OSError when the leader is gone, or at
        something else.
        """
        leader, head = self._peers[0], self._their_head
        _fill(leader, head[_begun(leader, head) :])
        num_bytes: int = _HEAD.unpack(head)[2]
        _check_head(0, head, self._next_head(_ORDER, num_bytes))
        order = np.empty(num_bytes // 8, dtype=np.int64)
        _fill(leader, order.view(np.uint8).data)
        return order

    def close(self) -> None:
        for connection in self._peers.values():
            connection.close()

    def _next_head(self, kind: bytes, num_bytes: int) -> bytes:
        self._number += 1
        return _HEAD.pack(kind, self._number, num_bytes)


def _bytes_of(x: Tensor) -> memoryview:
    return x.view(-1).view(torch.uint8).numpy().data


class _Transfer:
    """One message to a peer, and one from it, both under way."""

    def __init__(self, peer: int, connection: socket.socket, head: bytes, mine: memoryview, theirs: memoryview) -> None:
        """`head` is sent first, and expected first."""
        self._peer, self._connection, self._head = peer, connection, head
        self._their_head = memoryview(bytearray(len(head)))
        self._unsent = [memoryview(head), mine]
        self._missing = [self._their_head, theirs]

    def move(self, events: int) -> int:
        """Sends and receives what can be now. Returns the events to wait for; 0: all is done. Raises OSError."""
        if self._missing and events & ~select.POLLOUT:
            with suppress(BlockingIOError):
                count = self._connection.recvmsg_into(self._missing, 0, socket.MSG_DONTWAIT)[0]
                if not count:
                    raise _gone(self._peer)
                had_head = len(self._missing) == 1
                self._missing = _after(self._missing, count)
                if not had_head and len(self._missing) < 2:
                    _check_head(self._peer, self._their_head, self._head)
        if self._unsent and events & ~select.POLLIN:
            with suppress(BlockingIOError):
                self._unsent = _after(self._unsent, self._connection.sendmsg(self._unsent, (), socket.MSG_DONTWAIT))
        return (select.POLLIN if self._missing else 0) | (select.POLLOUT if self._unsent else 0)


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """The parts without their first `count` bytes."""
    left = []
    for part in parts:
        if count < len(part):
            left.append(part[count:])
        count = max(0, count - len(part))
    return left


def _check_head(peer: int, theirs: memoryview, mine: bytes) -> None:
    if theirs != mine:
        raise ConnectionAbortedError(
            f"ranks are out of step: rank {peer} is at {_described(theirs)}, this rank at {_described(mine)}"
        )


def _described(head: memoryview | bytes) -> str:
    kind, number, num_bytes = _HEAD.unpack(head)
    return f"{_KINDS.get(kind, 'no collective')} {number} of {num_bytes} bytes"


def _gone(peer: int) -> ConnectionResetError:
    return ConnectionResetError(f"rank {peer} has closed its connection")


def _tune(connection: socket.socket, timeout_s: float) -> None:
    """Blocking calls that the kernel ends: Python's own timeouts would cost a poll before each."""
    connection.settimeout(None)
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _begun(leader: socket.socket, head: memoryview) -> int:
    """Looks for the next order without sleeping, but not for long; ranks that share a core take turns. Its bytes."""
    end = time.perf_counter() + _SPIN_S
    while time.perf_counter() < end:
        try:
            return _checked(leader.recv_into(head, 0, socket.MSG_DONTWAIT))
        except BlockingIOError:
            os.sched_yield()
    return 0


def _fill(leader: socket.socket, left: memoryview) -> None:
    while left:
        try:
            left = left[_checked(leader.recv_into(left)) :]
        except BlockingIOError:  # the connection's timeout is that of sums: an order may take longer
            continue


def _checked(count: int) -> int:
    if not count:
        raise _gone(0)
    return count

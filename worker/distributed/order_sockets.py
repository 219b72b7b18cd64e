"""Orders of the leader to the other ranks: one TCP connection to each, apart from those of activations.

An order waits in the kernel's buffer until a rank has done the one before. A rank that waits looks for a while before
it sleeps: between the steps of a burst a sleeping core takes longer to wake than an order to come. What may not live
here: what is ordered.
"""

import os
import socket
import struct
import time
from collections.abc import Collection
from typing import Final

import numpy as np
from numpy.typing import NDArray

from holdfast.worker.distributed.peer_sockets import tune

_SPIN_S: Final = 500e-6
_LENGTH: Final = struct.Struct("=q")


class OrderSockets:
    """The leader's connections, or another rank's one to the leader."""

    def __init__(self, connections: Collection[socket.socket], timeout_s: float) -> None:
        """A send gives up after `timeout_s`."""
        self._peers = list(connections)
        for connection in self._peers:
            tune(connection, timeout_s)

    def send(self, order: NDArray[np.int64]) -> None:
        """Returns once the order is on its way to every rank. Raises OSError when one is gone, or takes none for longer
        than the timeout.
        """
        message = _LENGTH.pack(order.nbytes) + order.tobytes()
        for connection in self._peers:
            connection.sendall(message)

    def receive(self) -> NDArray[np.int64]:
        """The next order; blocks for however long it takes. Raises OSError when the leader is gone."""
        connection = self._peers[0]
        head = memoryview(bytearray(_LENGTH.size))
        _fill(connection, head[_begun(connection, head) :])
        order = np.empty(_LENGTH.unpack(head)[0] // 8, dtype=np.int64)
        _fill(connection, order.view(np.uint8).data)
        return order

    def close(self) -> None:
        for connection in self._peers:
            connection.close()


def _begun(connection: socket.socket, head: memoryview) -> int:
    """Looks for the next order without sleeping, but not for long; ranks that share a core take turns. Its bytes."""
    end = time.perf_counter() + _SPIN_S
    while time.perf_counter() < end:
        try:
            return _checked(connection.recv_into(head, 0, socket.MSG_DONTWAIT))
        except BlockingIOError:
            os.sched_yield()
    return 0


def _fill(connection: socket.socket, left: memoryview) -> None:
    while left:
        try:
            left = left[_checked(connection.recv_into(left)) :]
        except BlockingIOError:  # the connection's timeout is that of sums: an order may take longer
            continue


def _checked(count: int) -> int:
    if not count:
        raise ConnectionResetError("the leader has closed its connection")
    return count

"""Accepted TCP connections of this process by their peers, and how to close one at once.

grpc.aio closes no single connection, so the kernel is asked: `/proc/self/fd` has every socket, a duplicate of it says
who is at its ends, and a shutdown of the duplicate is seen by whatever reads the socket. What may not live here: whose
connections are closed, and why.
"""

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Final

from holdfast.router.security.connection_budgets import Peer, peer

DESCRIPTORS: Final = "/proc/self/fd"


def num_descriptors() -> int:
    """Open files of this process: at least as many as it has connections, and quick to count."""
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
    """Duplicates of the sockets, which the caller closes. A duplicate stays that connection's, whatever becomes of the
    number of its descriptor.
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

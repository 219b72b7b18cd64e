"""Accepted TCP connections of this process by their peers, and how to close one at once.

grpc.aio closes no single connection, so the kernel is asked: `/proc/self/fd` has every socket, a duplicate of it says
who is at its ends, and a shutdown of the duplicate is seen by whatever reads the socket. What may not live here: whose
connections are closed, and why.
"""

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import suppress
from ipaddress import ip_address
from typing import Final, NamedTuple
from urllib.parse import unquote

DESCRIPTORS: Final = "/proc/self/fd"


class Peer(NamedTuple):
    """The other end of a connection."""

    host: str
    """Its IP address as `ipaddress` writes it; an IPv4 address that an IPv6 socket has is written as IPv4."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def peer_of(grpc_peer: str) -> Peer | None:
    """A peer as gRPC writes it (`ipv4:1.2.3.4:5`, `ipv6:%5B::1%5D:5`); None for what is no TCP connection."""
    family, _, address = grpc_peer.partition(":")
    host, _, port = unquote(address).rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _peer(host.strip("[]"), int(port))


def num_descriptors() -> int:
    """Open files of this process: at least as many as it has connections, and quick to count."""
    return len(os.listdir(DESCRIPTORS))


def accepted(port: int) -> set[Peer]:
    """Peers of all connections that came to this port of this process."""
    peers = set()
    for connection, peer in _accepted({port}):
        connection.close()
        peers.add(peer)
    return peers


def cut_off(peers: Collection[Peer], ports: Collection[int]) -> set[Peer]:
    """Closes the connections of these peers to these ports, in both directions and at once. Returns whose it found."""
    found = set()
    for connection, peer in _accepted(ports):
        with connection:
            if peer in peers:
                with suppress(OSError):  # the peer was faster
                    connection.shutdown(socket.SHUT_RDWR)
                found.add(peer)
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
                peer = _peer(host, port)
            except (OSError, ValueError, IndexError, TypeError):
                duplicate.close()
                continue
            yield duplicate, peer


def _peer(host: str, port: int) -> Peer:
    address = ip_address(host.partition("%")[0])
    return Peer(str(getattr(address, "ipv4_mapped", None) or address), port)

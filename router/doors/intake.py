"""Intake of a router's doors: the lease of each request, which it has from its first byte until its answer is over.

What may live here: opening leases, and who a connection and an account are. What may not: budgets and pressures
(`router/overload/`), bodies and messages (`http/`, `grpc/`).
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final
from urllib.parse import unquote

from holdfast.router.overload.byte_ledger import Lease, current_lease, set_lease
from holdfast.router.overload.known_peers import KnownPeers
from holdfast.router.overload.overload import Overload
from holdfast.router.security.gate import Caller, Gate
from holdfast.worker.errors import AuthenticationError, HoldfastError

MOST_PEERS: Final = 2**14
"""gRPC connections that are told from new ones."""


class Intake:
    """Of one router."""

    def __init__(self, overload: Overload, gate: Gate) -> None:
        self.overload = overload
        self._gate = gate
        self._peers = KnownPeers(MOST_PEERS)

    @contextmanager
    def of_http(self, host: str, port: int, *, is_guest: bool) -> Iterator[Lease]:
        """For a request of the running task. `is_guest`: its connection came while none was taken."""
        lease = self.overload.ledger.open(f"{host}:{port}", host)
        lease.is_guest = is_guest
        with _held(lease):
            yield lease

    @contextmanager
    def of_grpc(self, peer: str) -> Iterator[Lease]:
        """For a call of the running task; `peer` is `ServicerContext.peer()`."""
        lease = self.overload.ledger.open(peer, _host(peer))
        lease.is_guest = not self._peers.note(peer, accepts=self.overload.takes_connection())
        with _held(lease):
            if self._gate.is_locked:
                with suppress(AuthenticationError):  # what is open to everyone counts for its address
                    charge(self._gate.caller())
            yield lease


def _host(peer: str) -> str:
    """The address in a peer as gRPC writes it (`ipv4:1.2.3.4:5`, `ipv6:%5B::1%5D:5`), as HTTP's doors write it."""
    return unquote(peer.partition(":")[2]).rpartition(":")[0].strip("[]")


def charge(caller: Caller) -> None:
    """The caller of the running task's request is known: what it holds is that key's. Raises `ByteBudgetError`."""
    if (lease := current_lease()) is not None:
        lease.belongs_to(f"key {caller.name}")


class _Arriving:
    """Input that the running task reads. Ended, the task gets the error at once."""

    num_unread = 0

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "requests are read by tasks"
        self.task = task
        self.error: HoldfastError | None = None

    def fail(self, error: HoldfastError) -> None:
        if self.error is None:
            self.error = error
            self.task.cancel()


@contextmanager
def arriving() -> Iterator[Callable[[int], None]]:
    """While the running task reads the input of its request: yields what is told each number of bytes that arrives.

    Raises `ByteBudgetError`, also where the request is ended for what it holds.
    """
    lease = current_lease()
    if lease is None:
        yield lambda num_bytes: None
        return
    one = _Arriving()
    lease.endings.append(one)
    try:
        yield lease.take
    except asyncio.CancelledError:
        if one.error is None:
            raise
        one.task.uncancel()
        raise one.error from None
    finally:
        lease.endings.remove(one)


@contextmanager
def _held(lease: Lease) -> Iterator[None]:
    set_lease(lease)
    try:
        yield
    finally:
        lease.close()

"""Intake of a router's APIs: the byte lease of each request, from its first byte to the end of its answer."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Final, TypeVar
from urllib.parse import unquote

from holdfast.router.overload.byte_ledger import CURRENT_LEASE, KnownPeers, Lease
from holdfast.router.overload.overload import Overload
from holdfast.router.security.gate import Caller, Gate
from holdfast.router.wire.bounds import INLINE_BYTES
from holdfast.worker.errors import AuthenticationError, HoldfastError
from holdfast.worker.process_memory import give_back

MAX_PEERS: Final = 2**14
"""gRPC connections that are remembered as not new, at most."""


class Intake:
    """Intake of one router's requests."""

    def __init__(self, overload: Overload, gate: Gate) -> None:
        self.overload = overload
        self._gate = gate
        self._peers = KnownPeers(MAX_PEERS)

    def of_http(self, host: str, port: int, *, is_guest: bool) -> Lease:
        """Lease of a request, which its task enters. `is_guest`: its connection came while none was accepted."""
        lease = self.overload.ledger.open(f"{host}:{port}", host)
        lease.is_guest = is_guest
        return lease

    def of_grpc(self, peer: str) -> Lease:
        """Lease of a call of the running task, which enters it; `peer` is `ServicerContext.peer()`."""
        lease = self.overload.ledger.open(peer, _host(peer))
        lease.is_guest = not self._peers.note(peer, accepts=self.overload.takes_connection())
        if self._gate.is_locked:
            with suppress(AuthenticationError):  # endpoints open to everyone count for their callers' addresses
                lease.belongs_to(_account(self._gate.caller()))
        return lease


def _host(peer: str) -> str:
    """The address in a peer as gRPC writes it (`ipv4:1.2.3.4:5`, `ipv6:%5B::1%5D:5`), as HTTP's APIs write it."""
    return unquote(peer.partition(":")[2]).rpartition(":")[0].strip("[]")


def _account(caller: Caller) -> str:
    return f"key {caller.name}"


def charge(caller: Caller) -> None:
    """The caller of the running task's request is known: its bytes count for that key. Raises `ByteBudgetError`."""
    if (lease := CURRENT_LEASE.get()) is not None:
        lease.belongs_to(_account(caller))


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
    """While the running task reads its request's input: yields a function that gets each number of bytes that arrives.

    Raises `ByteBudgetError`, also if the request is ended for its size.
    """
    lease = CURRENT_LEASE.get()
    if lease is None:
        yield lambda num_bytes: None
        return
    one = _Arriving()
    lease.endings.append(one)
    try:
        yield lease.take
    except asyncio.CancelledError as cancelled:
        if one.error is None:
            raise
        one.task.uncancel()
        cancelled.__traceback__ = None  # a cycle from Python 3.12 on, as in `naming`
        raise one.error from None
    finally:
        lease.endings.remove(one)


T = TypeVar("T")

LARGE_BYTES: Final = 2**20
"""After larger ones, memory is given back to the system."""

GIVE_BACK_AFTER_S: Final = 0.5
"""Called after the last of them: then the decoded request is gone too."""


class DecodeWorker:
    """Used from one event loop. Its thread starts with the first large message."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._num_waiting = 0
        self._giving_back: asyncio.TimerHandle | None = None

    async def run(self, num_bytes: int, decode: Callable[[], T]) -> T:
        """Result of `decode` for a message of this size. Raises its error."""
        if num_bytes <= INLINE_BYTES:
            return decode()
        self._num_waiting += 1
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, decode)
        finally:
            self._num_waiting -= 1
            if num_bytes > LARGE_BYTES and not self._num_waiting:
                self._cancel()
                self._giving_back = loop.call_later(GIVE_BACK_AFTER_S, self._give_back)

    def _give_back(self) -> None:
        with suppress(RuntimeError):  # it has been closed
            self._executor.submit(give_back)

    def _cancel(self) -> None:
        if self._giving_back is not None:
            self._giving_back.cancel()
            self._giving_back = None

    def close(self) -> None:
        """Ends the thread; waiting requests are cancelled. Stops decoding."""
        self._cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)


LONGEST: Final = 64  # characters


def loggable(name: str) -> str:
    """The name of a field that is not known, where it could be one."""
    return name if name.isidentifier() and len(name) <= LONGEST else "(not shown: no identifier)"

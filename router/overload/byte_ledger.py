"""Byte ledger: the bytes that requests in flight hold in a router, against budgets of connection, account and router.

A request has one lease, from the first byte that arrives of it until its answer is over. It takes bytes as they arrive
and gives them back once they are decoded; from then on it holds the output that its client has not read. An *account*
is the caller's key, or the address of the caller while no key is known or where none is required.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final, Protocol

from holdfast.router.config import OverloadConfig
from holdfast.worker.errors import ByteBudgetError, HoldfastError

GREEDY_BYTES: Final = 256 * 2**10
"""Bytes below which a request is never ended for its size."""

RETRY_S: Final = 1.0


UNREAD_TOKEN_BYTES: Final = 256
"""Bytes of an unread token's objects."""


class Ending(Protocol):
    """Part of a request that holds bytes and can be ended: input that arrives, or an answer that is read."""

    @property
    def num_unread(self) -> int:
        """Output tokens that wait for their reader."""

    def fail(self, error: HoldfastError) -> None:
        """Ends it with an error, which its client gets."""


class Lease:
    """Bytes that one request holds. Made by `ByteLedger.open`, and closed once."""

    __slots__ = ("_ledger", "account", "connection", "endings", "is_guest", "num_bytes")

    def __init__(self, ledger: "ByteLedger", connection: str, account: str) -> None:
        self._ledger = ledger
        self.connection = connection
        self.account = account
        self.is_guest = False
        """Whether its connection came while the router accepted none: see `Overload.takes_connection`."""
        self.num_bytes = 0
        """Bytes of its input."""
        self.endings: list[Ending] = []
        """Parts of it that can be ended now."""

    @property
    def held_bytes(self) -> int:
        return self.num_bytes + UNREAD_TOKEN_BYTES * sum(one.num_unread for one in self.endings)

    def end(self, error: HoldfastError) -> None:
        """Ends all of it."""
        for one in list(self.endings):
            one.fail(error)

    def take(self, num_bytes: int) -> None:
        """Adds bytes of input that has arrived. Raises `ByteBudgetError`, and then the lease is unchanged."""
        self._ledger.take(self, num_bytes)

    def belongs_to(self, account: str) -> None:
        """Assigns the lease to its caller's account, which is known by now. Raises `ByteBudgetError`."""
        if account != self.account:
            num_bytes = self.num_bytes
            self.give_back()
            self.account = account
            self.take(num_bytes)

    def give_back(self) -> None:
        """Returns the bytes of its input, which is decoded."""
        self._ledger.give_back(self)

    def close(self) -> None:
        """Closes the lease: its answer is over. Safe to call twice."""
        self._ledger.close(self)

    def __enter__(self) -> "Lease":
        """Belongs to the running task's request, until it is closed."""
        CURRENT_LEASE.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ByteLedger:
    """Ledger of one router, on one event loop."""

    def __init__(self, config: OverloadConfig) -> None:
        self._budgets = config
        self._leases: dict[Lease, None] = {}
        self.on_input: Callable[[int], None] = lambda num_bytes: None
        """Counts bytes that have arrived, before work on them begins."""
        self._by_connection: Counter[str] = Counter()
        self._by_account: Counter[str] = Counter()
        self.num_bytes = 0
        """Bytes of all requests' input."""
        self.num_given_back = 0
        """Bytes of input that were given back since the start."""
        self.refusals: Counter[str] = Counter()
        """Refusals by the setting of the budget."""

    def open(self, connection: str, account: str) -> Lease:
        """The lease of a new request, which holds nothing yet."""
        lease = Lease(self, connection, account)
        self._leases[lease] = None
        return lease

    def take(self, lease: Lease, num_bytes: int) -> None:
        """Same as `Lease.take`."""
        self.on_input(num_bytes)
        budgets = self._budgets
        self._check("connection", self._by_connection[lease.connection], num_bytes, budgets.max_connection_bytes)
        self._check("key", self._by_account[lease.account], num_bytes, budgets.max_key_bytes)
        self._check("router", self.num_bytes, num_bytes, budgets.max_router_bytes)
        self._add(lease, num_bytes)

    def give_back(self, lease: Lease) -> None:
        """Same as `Lease.give_back`."""
        self.num_given_back += lease.num_bytes
        self._add(lease, -lease.num_bytes)

    def close(self, lease: Lease) -> None:
        """Same as `Lease.close`."""
        if lease in self._leases:
            self.give_back(lease)
            del self._leases[lease]

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def held_bytes(self) -> int:
        """Input and unread output of all requests. Linear in the open requests."""
        return sum(lease.held_bytes for lease in self._leases)

    def greediest(self) -> Lease | None:
        """The request that holds the most, of the account that holds the most. None if it is small."""
        by_account: Counter[str] = Counter()
        largest: dict[str, tuple[int, Lease]] = {}
        for lease in self._leases:
            held = lease.held_bytes
            by_account[lease.account] += held
            if lease.endings and held >= largest.get(lease.account, (GREEDY_BYTES, lease))[0]:
                largest[lease.account] = held, lease
        if not by_account:
            return None
        ((worst, _),) = by_account.most_common(1)
        return largest[worst][1] if worst in largest else None

    def check_integrity(self) -> None:
        """Asserts that the sums are those of the leases."""
        assert self.num_bytes == sum(lease.num_bytes for lease in self._leases) >= 0
        for counts, name in ((self._by_connection, "connection"), (self._by_account, "account")):
            found: Counter[str] = Counter()
            for lease in self._leases:
                found[getattr(lease, name)] += lease.num_bytes
            assert +found == counts, f"{name}: {counts} were counted, {+found} are held"

    def _check(self, budget: str, held: int, more: int, most: int) -> None:
        if held + more > most:
            setting = f"overload.max_{budget}_bytes"
            self.refusals[setting] += 1
            whose = {"connection": "this connection", "key": "this key or address", "router": "this router"}[budget]
            message = f"{whose} has {held} bytes of requests in flight, and {more} more exceed {most} ({setting})"
            raise ByteBudgetError(message, RETRY_S)

    def _add(self, lease: Lease, change: int) -> None:
        if not change:
            return
        lease.num_bytes += change
        self.num_bytes += change
        for counts, name in ((self._by_connection, lease.connection), (self._by_account, lease.account)):
            counts[name] += change
            if not counts[name]:
                del counts[name]


CURRENT_LEASE: Final[ContextVar[Lease | None]] = ContextVar("holdfast_lease", default=None)
"""The lease of the running task's request; None where no API has opened one."""


class KnownPeers:
    """The peers that have called last, up to a number."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._peers: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def note(self, peer: str, *, accepts: bool) -> bool:
        """A call has come. Returns whether its connection is known; while new ones are accepted, it is from here on."""
        if peer in self._peers:
            self._peers.move_to_end(peer)
            return True
        if not accepts:
            return False
        self._peers[peer] = None
        if len(self._peers) > self._most:
            self._peers.popitem(last=False)
        return True

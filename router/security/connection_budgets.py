"""Budgets of clients' connections: calls that are reset at once, calls without a key, connections without a key. A
router assigns calls to connections, and closes connections beyond their budget. Cores without IO.

An address has two token buckets, which all of its connections share: one for calls that clients reset within a second
of making them, one for calls without a valid key. Who charges an empty bucket is cut off: one connection, never its
whole address, since others may be behind the same proxy. A connection most of whose calls are not reset stays, so that
a proxy with some hasty clients is not taken for an attack.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import ip_address, ip_network
from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote

from holdfast.router.token_bucket import BURST_S, TokenBucket

PREMATURE_S: Final = 1.0
"""A call that its client resets sooner than this counts as reset. Longer calls have cost a model's work, which other
limits cover.
"""

SUSPECT_S: Final = 5.0
"""Seconds for which connections are counted one by one after too many resets of unknown origin."""

ENDING_STREAMS: Final = 128
"""Streams of one connection that have ended, or were reset, and that this process still has to look at, beside
`max_concurrent_streams`. gRPC refuses streams beyond both. Without room for them it would refuse the next call of a
client that keeps to the limit, since the client knows of an end sooner.
"""

MAX_COUNTED: Final = 1024
"""Calls of a connection after which both of its counts are halved: it is judged by its latest."""

MIN_PRUNED: Final = 256
"""Connections and addresses up to which nothing is forgotten."""


class Reason(StrEnum):
    """Why a connection is cut off."""

    RESETS = "resets"
    CALLS_WITHOUT_KEY = "calls_without_key"
    CONNECTIONS_WITHOUT_KEY = "connections_without_key"

    @property
    def words(self) -> str:
        """The client's action, and the limit."""
        return {
            Reason.RESETS: "most of its calls were reset within a second (limits.max_resets_per_s)",
            Reason.CALLS_WITHOUT_KEY: "its address makes too many calls without a valid key "
            "(limits.max_unauthenticated_calls_per_s)",
            Reason.CONNECTIONS_WITHOUT_KEY: "it is the oldest of too many that have presented no valid key "
            "(limits.max_unauthenticated_connections)",
        }[self]


class Peer(NamedTuple):
    """The other end of a connection."""

    host: str
    """IP address as `ipaddress` writes it; an IPv4 address of an IPv6 socket is written as IPv4."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def address(self) -> str:
        """Address whose budgets it charges: its own, or for IPv6 its /64 network, which one client may have as a
        whole.
        """
        return self.host if ":" not in self.host else str(ip_network((self.host, 64), strict=False))


def peer(host: str, port: int) -> Peer:
    """The peer as a socket names it. Raises `ValueError` for a text that is not an IP address."""
    address = ip_address(host.partition("%")[0])
    return Peer(str(getattr(address, "ipv4_mapped", None) or address), port)


def peer_of(grpc_peer: str) -> Peer | None:
    """A peer as gRPC writes it (`ipv4:1.2.3.4:5`, `ipv6:%5B::1%5D:5`); None for a peer that is not a TCP connection."""
    family, _, address = grpc_peer.partition(":")
    host, _, port = unquote(address).rpartition(":")
    try:
        return peer(host.strip("[]"), int(port)) if family in ("ipv4", "ipv6") else None
    except ValueError:
        return None


class BudgetLimits(Protocol):
    """Limits read from `LimitsConfig`."""

    @property
    def max_resets_per_s(self) -> float:
        """Streams that one peer may reset in a second."""
        ...

    @property
    def max_unauthenticated_calls_per_s(self) -> float: ...
    @property
    def max_unauthenticated_connections(self) -> int:
        """Connections without a valid key that may be open at once."""
        ...


@dataclass(slots=True, eq=False)
class ClientConnection:
    """State of one connection."""

    peer: Peer
    since: float
    """When it was first seen."""
    is_known: bool = False
    """Whether a call on it has presented a valid key."""
    is_cut: bool = False
    """Whether it has been, or is about to be, cut off: no further event is charged."""
    num_calls: int = 0
    num_resets: int = 0

    def count(self, *, is_reset: bool) -> None:
        """Counts a call, or a reset. Old ones count half as much in time."""
        self.num_calls += not is_reset
        self.num_resets += is_reset
        if self.num_calls > MAX_COUNTED:
            self.num_calls //= 2
            self.num_resets //= 2

    @property
    def mostly_resets(self) -> bool:
        return 2 * self.num_resets >= self.num_calls


@dataclass(slots=True)
class _Buckets:
    """Token buckets of one address."""

    resets: TokenBucket
    unauthenticated: TokenBucket
    at: float
    """When one of them was charged last."""


@dataclass(slots=True)
class ConnectionBudgets:
    """The budgets of one router. Each event returns the reason to cut its connection off, or None. Time is passed in,
    in seconds.
    """

    limits: BudgetLimits
    asks_for_keys: bool
    _buckets: dict[str, _Buckets] = field(default_factory=dict)
    _unknown: TokenBucket | None = None
    """Bucket for resets whose connection is unknown."""
    _suspects_until: float = float("-inf")
    _prune_at: int = MIN_PRUNED

    def call(self, connection: ClientConnection, *, has_key: bool, now: float) -> Reason | None:
        """A call has begun on this connection, or was refused. `has_key`: it has presented a valid one."""
        connection.count(is_reset=False)
        if has_key or not self.asks_for_keys:
            connection.is_known |= has_key
            return None
        bucket = self._of(connection.peer, now).unauthenticated
        return self._charge(bucket, now, Reason.CALLS_WITHOUT_KEY)

    def reset(self, connection: ClientConnection | None, now: float) -> Reason | None:
        """A call was reset within `PREMATURE_S`. None: on an unknown connection."""
        if connection is None:
            self._unknown = self._unknown or TokenBucket(self.limits.max_resets_per_s)
            if self._unknown.wait_s(now, 1.0):
                self._suspects_until = now + SUSPECT_S
            else:
                self._unknown.take(1.0, now)
            return None
        connection.count(is_reset=True)
        reason = self._charge(self._of(connection.peer, now).resets, now, Reason.RESETS)
        if reason is not None:
            self._suspects_until = now + SUSPECT_S
        return reason if connection.mostly_resets else None

    def suspects(self, now: float) -> bool:
        """Whether each call must be assigned to its connection before its message arrives."""
        return now < self._suspects_until

    def overdue(self, strangers: Collection[ClientConnection]) -> list[ClientConnection]:
        """Which of the connections without a key are too many: the oldest. Who has a key presents it soon."""
        too_many = len(strangers) - self.limits.max_unauthenticated_connections
        if not self.asks_for_keys or too_many <= 0:
            return []
        return sorted(strangers, key=lambda one: one.since)[:too_many]

    @staticmethod
    def _charge(bucket: TokenBucket, now: float, reason: Reason) -> Reason | None:
        if bucket.wait_s(now, 1.0):
            return reason
        bucket.take(1.0, now)
        return None

    def _of(self, client: Peer, now: float) -> _Buckets:
        address = client.address
        buckets = self._buckets.get(address)
        if buckets is None:
            self._prune(now)
            rates = self.limits.max_resets_per_s, self.limits.max_unauthenticated_calls_per_s
            resets, unauthenticated = map(TokenBucket, rates)
            buckets = self._buckets[address] = _Buckets(resets, unauthenticated, now)
        buckets.at = now
        return buckets

    def _prune(self, now: float) -> None:
        """Forgets addresses whose buckets are full again, before they are too many."""
        if len(self._buckets) >= self._prune_at:
            self._buckets = {address: one for address, one in self._buckets.items() if now - one.at < BURST_S}
            self._prune_at = max(MIN_PRUNED, 2 * len(self._buckets))


class GuardedConnections:
    """Connections of one router. Time is passed in, in seconds."""

    def __init__(
        self,
        limits: BudgetLimits,
        *,
        asks_for_keys: bool,
        on_cut: Callable[[ClientConnection, Reason], None] = lambda connection, reason: None,
    ) -> None:
        """`on_cut` is called with each connection to close, and the reason."""
        self.budgets = ConnectionBudgets(limits, asks_for_keys)
        self._on_cut = on_cut
        self._by_name: dict[str, ClientConnection] = {}
        """Connections that have made calls, by gRPC's name."""
        self._by_peer: dict[Peer, ClientConnection] = {}
        self._prune_at = MIN_PRUNED
        self._to_cut: set[Peer] = set()
        self.num_resets = 0
        """Calls that clients have reset within `PREMATURE_S`."""

    @property
    def are_many(self) -> bool:
        """Whether it is time to `look` which are gone."""
        return len(self._by_name) >= self._prune_at

    @property
    def has_to_cut(self) -> bool:
        return bool(self._to_cut)

    @property
    def has_work(self) -> bool:
        """Whether there are connections to cut off, or it is time to `look`."""
        return bool(self._to_cut) or len(self._by_name) >= self._prune_at

    def call(self, name: str, *, has_key: bool, now: float) -> bool:
        """A call has begun on this connection. False if the connection is cut off and the call gets no answer."""
        connection = self._named(name, now)
        if connection is None:
            return True
        if not connection.is_cut:
            self._judge(connection, self.budgets.call(connection, has_key=has_key, now=now))
        return not connection.is_cut

    def reset(self, name: str, *, began_at: float, now: float) -> None:
        """The client has ended a call of this connection that began then; an empty name: the connection is unknown."""
        if now - began_at > PREMATURE_S:
            return
        self.num_resets += 1
        connection = self._named(name, now) if name else None
        if connection is None:
            self.budgets.reset(None, now)
        elif not connection.is_cut:
            self._judge(connection, self.budgets.reset(connection, now))

    def look(self, alive: Collection[Peer], began_at: float) -> None:
        """Forgets the connections that were gone when it `began_at`, and finds those without a key that are too many.

        `alive`: the peers of all sockets of this router's ports.
        """
        for caller in alive:
            self._by_peer.setdefault(caller, ClientConnection(caller, began_at))
        here = {caller: one for caller, one in self._by_peer.items() if caller in alive or one.since >= began_at}
        self._by_peer = here
        self._by_name = {name: one for name, one in self._by_name.items() if here.get(one.peer) is one}
        self._prune_at = max(MIN_PRUNED, 2 * len(self._by_name))
        strangers = [one for one in here.values() if not (one.is_known or one.is_cut)]
        for one in self.budgets.overdue(strangers):
            self._judge(one, Reason.CONNECTIONS_WITHOUT_KEY)

    def take_to_cut(self) -> set[Peer]:
        """The peers whose connections to close now."""
        peers, self._to_cut = self._to_cut, set()
        return peers

    def cut_again(self, missed: Collection[Peer]) -> None:
        """Tries connections again that could not be closed and are not gone."""
        self._to_cut |= {caller for caller in missed if caller in self._by_peer}

    def _named(self, name: str, now: float) -> ClientConnection | None:
        connection = self._by_name.get(name)
        if connection is None and (caller := peer_of(name)) is not None:
            connection = self._by_peer.setdefault(caller, ClientConnection(caller, now))
            self._by_name[name] = connection
        return connection

    def _judge(self, connection: ClientConnection, reason: Reason | None) -> None:
        if reason is not None:
            connection.is_cut = True
            self._to_cut.add(connection.peer)
            self._on_cut(connection, reason)

"""Guarded connections of a router: the clients' connections that it knows by their calls, and which are to be closed.
A core without IO.

    guarded = GuardedConnections(limits, asks_for_keys=True)
    guarded.call(name, has_key=False, now=now)      # each event, by the connection's name in gRPC
    guarded.reset(name, began_at=began_at, now=now)
    guarded.take_to_cut()                           # close these; they are returned once
"""

from collections.abc import Callable, Collection
from typing import Final

from holdfast.router.security.connection_budgets import (
    PREMATURE_S,
    BudgetLimits,
    ClientConnection,
    ConnectionBudgets,
    Peer,
    Reason,
    peer_of,
)

LEAST_PRUNED: Final = 256
"""Connections up to which none is forgotten."""


class GuardedConnections:
    """Of one router. Time is passed in, in seconds."""

    def __init__(
        self,
        limits: BudgetLimits,
        *,
        asks_for_keys: bool,
        on_cut: Callable[[ClientConnection, Reason], None] = lambda connection, reason: None,
    ) -> None:
        """`on_cut` is told of each connection that is to be closed, and why."""
        self.budgets = ConnectionBudgets(limits, asks_for_keys)
        self._on_cut = on_cut
        self._by_name: dict[str, ClientConnection] = {}
        """As gRPC names them: those that have made calls."""
        self._by_peer: dict[Peer, ClientConnection] = {}
        self._prune_at = LEAST_PRUNED
        self._to_cut: set[Peer] = set()
        self.num_resets = 0
        """Calls that clients have reset within `PREMATURE_S`."""

    @property
    def are_many(self) -> bool:
        """It is time to `look` which are gone."""
        return len(self._by_name) >= self._prune_at

    @property
    def has_to_cut(self) -> bool:
        return bool(self._to_cut)

    def suspects(self, now: float) -> bool:
        """As `ConnectionBudgets.suspects`."""
        return self.budgets.suspects(now)

    def call(self, name: str, *, has_key: bool, now: float) -> bool:
        """A call has begun on this connection. False if the connection is cut off, and nobody waits for an answer."""
        connection = self._named(name, now)
        if connection is None:
            return True
        if not connection.is_cut:
            self._judge(connection, self.budgets.call(connection, has_key=has_key, now=now))
        return not connection.is_cut

    def reset(self, name: str, *, began_at: float, now: float) -> None:
        """The client has ended a call of this connection that began then; an empty name: nobody knows which one's."""
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
        self._prune_at = max(LEAST_PRUNED, 2 * len(self._by_name))
        strangers = [one for one in here.values() if not (one.is_known or one.is_cut)]
        for one in self.budgets.overdue(strangers):
            self._judge(one, Reason.CONNECTIONS_WITHOUT_KEY)

    def take_to_cut(self) -> set[Peer]:
        """The peers whose connections are to be closed now."""
        peers, self._to_cut = self._to_cut, set()
        return peers

    def cut_again(self, missed: Collection[Peer]) -> None:
        """Those that could not be closed, and are not gone, are tried again."""
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

"""Known peers: the connections of a gRPC server by their first call, since gRPC tells of no connection that is made.

A peer is an address with its port, so it names one connection. One that has called while connections were accepted is
known, until enough others have called after it. No IO. What may not live here: what becomes of calls of others.
"""

from collections import OrderedDict


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

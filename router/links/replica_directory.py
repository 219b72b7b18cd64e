"""How a router learns which replicas there are. Whoever places replicas implements `ReplicaDirectory`.

A directory says where replicas should be; whether one is up, a router finds out by itself, over the link.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEndpoint:
    """Where a replica is. A replica that comes back elsewhere keeps its id or takes a new one; both are fine."""

    replica_id: str
    address: str
    """`host:port` of its link."""
    model: str
    """The name that clients use."""
    model_path: str
    """A folder that the router can read, with the tokenizer."""


class ReplicaDirectory(Protocol):
    """The source of truth about placement."""

    def watch(self) -> AsyncIterator[frozenset[ReplicaEndpoint]]:
        """Yields the whole set at once, then again after every change. Never ends by itself.

        A replica that is missing from a set gets nothing new; what runs there goes on until its link ends.
        """


class StaticDirectory:
    """A set of replicas that is known beforehand, or set by hand."""

    def __init__(self, endpoints: Iterable[ReplicaEndpoint] = ()) -> None:
        self._endpoints = frozenset(endpoints)
        self._changed = asyncio.Event()

    def set(self, endpoints: Iterable[ReplicaEndpoint]) -> None:
        """To be called on the event loop of those who watch."""
        self._endpoints = frozenset(endpoints)
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self) -> AsyncIterator[frozenset[ReplicaEndpoint]]:
        while True:
            changed = self._changed
            yield self._endpoints
            await changed.wait()

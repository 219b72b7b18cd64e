"""Hash ring of consistent hashing: replicas at fixed places on a circle, and the order from a key's place on.

What may live here: the ring. What may not: load, and which replica is taken (`policy.py`). The places depend on the
replicas' ids alone, so all routers agree on them.
"""

from bisect import bisect, insort
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

NUM_POINTS: Final = 64
"""Places of each replica on the ring: shares of the circle then differ by about 12 %."""


class HashRing:
    """Slots of replicas by their places. Adding one takes a millisecond at a thousand replicas."""

    __slots__ = ("_points",)

    def __init__(self) -> None:
        self._points: list[tuple[int, int]] = []

    def add(self, replica_id: str, slot: int) -> None:
        for number in range(NUM_POINTS):
            insort(self._points, (_place(f"{replica_id}#{number}"), slot))

    def remove(self, slot: int) -> None:
        self._points = [point for point in self._points if point[1] != slot]

    def walk(self, key: str) -> Iterator[int]:
        """Each slot once, in the order of their places from that of `key` on."""
        points, seen = self._points, set[int]()
        start = bisect(points, (_place(key), -1))
        for step in range(len(points)):
            slot = points[(start + step) % len(points)][1]
            if slot not in seen:
                seen.add(slot)
                yield slot


def _place(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")

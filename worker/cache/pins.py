"""Pins: cached blocks that requests have asked to keep for a time, by tenant, within a budget each.

A pin changes the order of eviction only. It takes no block from a running sequence: pinned blocks count as free, and
the allocator evicts them after all others.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple


class Pin(NamedTuple):
    """Pin of one block."""

    tenant: str
    until_s: float


class Pins:
    """Pinned blocks by tenant, with expiry times. Every call costs O(log pins) per block.

    `budget`: most blocks of one tenant. Beyond it, the tenant's least recently set or renewed pins are dropped; those
    of other tenants stay. A pinned block is cached, and a block's hash covers its tenant: no block has pins of two.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.by_block: dict[int, Pin] = {}
        """Pins by block. To be read only."""
        self._by_tenant: dict[str, OrderedDict[int, None]] = {}  # the next to give way first
        self._ends: list[tuple[float, int]] = []  # a heap; an entry counts if `_looked_at` says the same
        self._looked_at: dict[int, float] = {}

    @property
    def next_end_s(self) -> float:
        """Time at which `end` may have something to do; infinite without pins."""
        return self._ends[0][0] if self._ends else float("inf")

    def put(self, block_ids: Sequence[int], tenant: str, until_s: float) -> list[int]:
        """Pins the blocks of a prefix, given from its beginning, as far as the budget goes. A pin that lasts longer
        stays as long. Returns the blocks whose pins were dropped, in the order in which to evict them.
        """
        if not (kept := block_ids[: self.budget]):
            return []
        order = self._by_tenant.setdefault(tenant, OrderedDict())
        for block_id in reversed(kept):  # of those pinned together the last gives way first
            pin = self.by_block.get(block_id, Pin(tenant, until_s))
            assert pin.tenant == tenant, f"block {block_id} is pinned for another tenant"
            self.by_block[block_id] = Pin(tenant, max(until_s, pin.until_s))
            order[block_id] = None
            order.move_to_end(block_id)
            self._look_at(block_id, self.by_block[block_id].until_s)
        beyond = [next_one for next_one, _ in zip(order, range(len(order) - self.budget), strict=False)]
        for block_id in beyond:
            self.drop(block_id)
        return beyond

    def drop(self, block_id: int) -> None:
        """Removes the block's pin, if it has one."""
        if (pin := self.by_block.pop(block_id, None)) is not None:
            order = self._by_tenant[pin.tenant]
            del order[block_id]
            if not order:
                del self._by_tenant[pin.tenant]

    def of(self, tenant: str) -> list[int]:
        """Blocks that a tenant has pinned, in the order in which to evict them."""
        return list(self._by_tenant.get(tenant, ()))

    def shorten(self, block_id: int, until_s: float) -> None:
        """The block's pin ends at this time, if that is sooner."""
        pin = self.by_block[block_id]
        if until_s < pin.until_s:
            self.by_block[block_id] = pin._replace(until_s=until_s)
            self._look_at(block_id, until_s)

    def end(self, now: float) -> list[int]:
        """Drops the pins whose time is up, and returns their blocks."""
        ended = []
        while self._ends and self._ends[0][0] <= now:
            at, block_id = heappop(self._ends)
            if self._looked_at.get(block_id) != at:
                continue
            del self._looked_at[block_id]
            if (pin := self.by_block.get(block_id)) is None:
                continue
            if pin.until_s <= now:
                self.drop(block_id)
                ended.append(block_id)
            else:
                self._look_at(block_id, pin.until_s)
        return ended

    def check_integrity(self, cached: Iterable[int]) -> None:
        """Raises AssertionError unless pinned blocks are among the cached ones, within budgets, and will be ended."""
        assert self.by_block.keys() <= set(cached), "a pinned block is not cached"
        orders = {block_id: tenant for tenant, order in self._by_tenant.items() for block_id in order}
        assert orders == {block_id: pin.tenant for block_id, pin in self.by_block.items()}, "pins and tenants differ"
        for tenant, order in self._by_tenant.items():
            assert 0 < len(order) <= self.budget, f"tenant {tenant!r} has {len(order)} pins of {self.budget}"
        for block_id, pin in self.by_block.items():
            assert self._looked_at.get(block_id, pin.until_s + 1) <= pin.until_s, f"the pin of {block_id} has no end"

    def _look_at(self, block_id: int, at: float) -> None:
        """Schedules the check of the pin's expiry."""
        if at < self._looked_at.get(block_id, float("inf")):
            self._looked_at[block_id] = at
            heappush(self._ends, (at, block_id))

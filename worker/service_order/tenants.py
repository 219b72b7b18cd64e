"""Virtual token counters: how much service each tenant has had, for fair scheduling.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). What may live here: the counters. What may
not: the order of the requests that wait (`waiting_queue.py`).
"""

from collections.abc import Mapping
from typing import Final

PROMPT_WEIGHT: Final = 1.0
OUTPUT_WEIGHT: Final = 2.0
"""What a token costs its tenant. An output token costs more, as in the paper: it takes a row of a step for itself."""

_NUM_KEPT: Final = 1024
"""Tenants that are remembered whatever they do."""


class Tenant:
    """One tenant's account. Compared by identity."""

    __slots__ = ("counter", "name", "num_waiting", "output_token_cost", "share")

    def __init__(self, name: str, share: float) -> None:
        self.name = name
        self.share = share
        """Its weight: of two tenants who always have requests waiting, one with twice the share gets twice as much."""
        self.output_token_cost = OUTPUT_WEIGHT / share
        """What `charge` adds to the counter for one output token."""
        self.counter = 0.0
        """Weighted tokens served, over the share. Never falls; the tenant with the smallest is served next."""
        self.num_waiting = 0

    def charge(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count tokens that are computed for it. Those from the prefix cache, and a replay's, cost nothing."""
        self.counter += (PROMPT_WEIGHT * num_prompt_tokens + OUTPUT_WEIGHT * num_output_tokens) / self.share


class TenantCounters:
    """All accounts of one queue.

    A tenant is active while it has requests waiting. One that becomes active is lifted to the smallest counter of the
    active ones, or, if there are none, to that of the tenant that last was: idling earns no credit, and service beyond
    one's share is not forgotten.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = dict(shares)
        self._tenants: dict[str, Tenant] = {}
        self._active: dict[str, Tenant] = {}
        self._last_active: Tenant | None = None
        self._sweep_at = _NUM_KEPT

    def __len__(self) -> int:
        return len(self._tenants)

    def of(self, name: str) -> Tenant:
        """The account of that name; a new one where there is none."""
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= self._sweep_at:
                self._sweep()
            tenant = self._tenants[name] = Tenant(name, self._shares.get(name, 1.0))
        return tenant

    def note_waiting(self, tenant: Tenant) -> None:
        """One more of its requests waits. O(1), but O(active tenants) for one that becomes active."""
        if tenant.num_waiting == 0:
            tenant.counter = max(tenant.counter, self._floor())
            self._active[tenant.name] = tenant
        tenant.num_waiting += 1

    def note_gone(self, tenant: Tenant) -> None:
        """One less waits."""
        tenant.num_waiting -= 1
        if tenant.num_waiting == 0:
            del self._active[tenant.name]
            self._last_active = tenant

    def served_at_once(self, name: str) -> Tenant:
        """The account of a request that is served without a wait: lifted as if it had waited for no time."""
        tenant = self.of(name)
        if tenant.num_waiting == 0:
            tenant.counter = max(tenant.counter, self._floor())
            self._last_active = tenant
        return tenant

    def _floor(self) -> float:
        if self._active:
            return min(tenant.counter for tenant in self._active.values())
        return 0.0 if self._last_active is None else self._last_active.counter

    def _sweep(self) -> None:
        """Forget the idle ones that would be lifted anyway, so that a stream of ever new names does not pile up."""
        floor = self._floor()
        self._tenants = {
            name: tenant for name, tenant in self._tenants.items() if tenant.num_waiting > 0 or tenant.counter > floor
        }
        self._sweep_at = max(_NUM_KEPT, 2 * len(self._tenants))

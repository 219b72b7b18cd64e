"""Invariants of a simulated cluster, which must always hold.

Cheap checks run after every event, deep ones every `EVENTS_PER_DEEP_CHECK` events and at the end. A client's output is
checked in `client.py`, a router's actions in `audit.py` (`cluster/simulate/actors/`).
"""

from typing import Final

from holdfast.cluster.simulate.actors.replica import SimulatedReplica
from holdfast.cluster.simulate.actors.router import SimulatedRouter
from holdfast.cluster.simulate.kernel.timeline import Violation, require

EVENTS_PER_DEEP_CHECK: Final = 400  # simulated events


class Checks:
    """The invariants of a simulated cluster."""

    def __init__(self, routers: list[SimulatedRouter], replicas: list[SimulatedReplica]) -> None:
        self._routers = routers
        self._replicas = replicas
        self._num_events = 0

    def after_event(self) -> None:
        """Checks the limits of queues, and now and then everything. Raises Violation."""
        for replica in self._replicas:
            if replica.is_up and replica.core.load.num_waiting > replica.max_num_waiting:
                raise Violation(
                    f"{replica}: {replica.core.load.num_waiting} wait, and only {replica.max_num_waiting} may"
                )
        self._num_events += 1
        if self._num_events % EVENTS_PER_DEEP_CHECK == 0:
            self.deep()

    def deep(self) -> None:
        """Checks that the records of every process are consistent."""
        for process in (*self._routers, *self._replicas):
            if process.is_up:
                process.check_integrity()

    def at_end(self) -> None:
        """Checks, once all is answered and healed, that nothing is left anywhere."""
        self.deep()
        for router in self._routers:
            require(router.is_up and not router.is_frozen, f"{router} did not come back")
            num_open = router.dispatch_host.dispatch.num_open
            require(num_open == 0, f"{router}: {num_open} records leaked")
            num_withdrawn = router.dispatch_host.dispatch.num_withdrawn
            require(num_withdrawn == 0, f"{router}: {num_withdrawn} withdrawn attempts were never reported as ended")
            require(router.num_links_up == len(self._replicas), f"{router}: {router.num_links_up} links are up")
        for replica in self._replicas:
            require(replica.is_up and not replica.is_frozen, f"{replica} did not come back")
            stats = replica.core.scheduler.stats()
            num_alive = stats.num_running + stats.num_waiting
            require(num_alive == 0, f"{replica}: {num_alive} attempts run without a request")
            require(replica.num_unanswered == 0, f"{replica}: {replica.num_unanswered} attempts were never answered")
            require(stats.num_used_blocks == 0, f"{replica}: {stats.num_used_blocks} blocks leaked")
            replica.core.scheduler.pinning.end(replica.clock)
            num_pinned = replica.core.scheduler.stats().num_pinned_blocks
            require(num_pinned == 0, f"{replica}: {num_pinned} blocks are pinned, and no request asks for that now")

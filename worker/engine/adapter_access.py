"""Access of a replica to the desk of adapters of its engine: it is set up here, and told which adapters are pinned."""

from collections.abc import Callable, Sequence

from holdfast.worker.adapter import Adapter
from holdfast.worker.engine.adapters import AdapterOrders
from holdfast.worker.engine.engine_core import EngineCore
from holdfast.worker.engine.held_requests import AdapterDesk
from holdfast.worker.engine.inbox import Inbox


class AdapterAccess:
    """The adapters of an engine, which may serve none."""

    def __init__(self, core: EngineCore, inbox: Inbox, land: Callable[[], None], clock: Callable[[], float]) -> None:
        """`land` waits for the steps in flight, on the engine's thread."""
        self._core = core
        self._inbox = inbox
        self._land = land
        self._clock = clock

    def serve(self, num_slots: int, orders: AdapterOrders) -> None:
        """Enables LoRA adapters, with at most this number resident at a time. Call before the start."""

        def later(ticket: int) -> Callable[[], None]:
            return lambda: self._inbox.put_unless_closed(lambda: self._take(ticket))

        slots, in_use = self._core.scheduler.adapter_slots, self._core.adapters_in_use
        self._core.serve_adapters(AdapterDesk(num_slots, slots, in_use, orders.fetch, orders.take, later, self._clock))

    def keep(self, adapters: Sequence[Adapter]) -> None:
        """Adapters that stay resident from now on, in place of those before. From any thread."""
        if (desk := self._core.adapters) is not None:
            self._inbox.put_unless_closed(lambda: desk.keep(adapters))

    def _take(self, ticket: int) -> None:
        self._land()
        self._core.adapter_loaded(ticket)

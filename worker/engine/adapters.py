"""Adapters of a replica: which are resident, who waits for one, and how all ranks load it beside their steps.

    desk (leader, no IO): requests wait ─► order FETCH ─► each rank reads and packs on a thread ─► order TAKE between
    two steps ─► the slot holds it on all ranks, or on none ─► the requests go on

A slot is given to another adapter only when no request with the one that it holds is open.
"""

import logging
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Final, NamedTuple

import numpy as np
import torch

from holdfast.worker.adapter import Adapter
from holdfast.worker.distributed.tensor_parallel import Message, TensorParallelGroup
from holdfast.worker.engine.rank_orders import Order
from holdfast.worker.errors import ConfigurationError, HoldfastError, InvalidRequestError
from holdfast.worker.executors.cpu.adapters import PackedAdapter
from holdfast.worker.executors.cpu.executor import CpuExecutor
from holdfast.worker.models.adapter_folder import read_adapter
from holdfast.worker.models.adapter_places import AdapterPlaces
from holdfast.worker.request import EngineRequest
from holdfast.worker.step_update import StepListener

logger = logging.getLogger(__name__)

_HEADER: Final = 2


class AdapterGoneError(ConfigurationError):
    """The folder of an adapter holds another one now. The message names both digests."""


class RankAdapters:
    """One rank's part: reads, checks and packs on a thread, and puts what is packed in a slot."""

    def __init__(self, executor: Callable[[], CpuExecutor], places: AdapterPlaces, group: TensorParallelGroup) -> None:
        """`executor`: of the weights that are served now."""
        self._executor = executor
        self._places = places
        self._group = group
        self._loads: dict[int, Future[PackedAdapter]] = {}

    def load(self, adapter: Adapter) -> PackedAdapter:
        """This rank's share. Raises `ConfigurationError` for what is not to be served."""
        folder = read_adapter(adapter.name, adapter.path)
        if folder.digest != adapter.digest:
            raise AdapterGoneError(
                f"{folder.given}: it holds {folder.digest[:16]} now, and the request is for {adapter.digest[:16]}; "
                "load the adapter again, under this name or another"
            )
        if not folder.has_effect:
            logger.warning("%s: it adds nothing but zeros, so that outputs are those of the model alone", folder.given)
        return self._executor().pack_adapter(self._places.apply(folder))

    def fetch(self, ticket: int, adapter: Adapter, then: Callable[[], None] = lambda: None) -> None:
        """Begins to load, on a thread; calls `then` there when that is over."""
        future = self._loads[ticket] = Future[PackedAdapter]()

        def load() -> None:
            try:
                future.set_result(self.load(adapter))
            except BaseException as error:  # the leader's requests are told
                future.set_exception(error)
            then()

        threading.Thread(target=load, name="adapter", daemon=True).start()

    def take(self, ticket: int, slot: int) -> Exception | None:
        """Puts what was loaded in a slot if all ranks have it; else the reason, as this rank knows it."""
        future = self._loads.pop(ticket)
        failure = future.exception()
        loaded = self._group.all_gather(torch.tensor([failure is None], dtype=torch.uint8), dim=0)
        if bool(loaded.min()):
            self._executor().put_adapter(slot, future.result())
            return None
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        return failure or ConfigurationError("another rank of the replica cannot load it; its log says why")

    def carry_out(self, order: Message) -> None:
        """Carries out the leader's order, on another rank."""
        kind, ticket = order[:_HEADER].tolist()
        if kind == Order.FETCH_ADAPTER:
            self.fetch(ticket, Adapter(*bytes(order[_HEADER:].tolist()).decode().split("\0")))
        else:
            self.take(ticket, int(order[_HEADER]))


class AdapterOrders:
    """The leader's orders to all ranks, its own part included."""

    def __init__(self, own: RankAdapters, group: TensorParallelGroup) -> None:
        self.own = own
        self._group = group

    def fetch(self, ticket: int, adapter: Adapter, then: Callable[[], None]) -> None:
        self._order(Order.FETCH_ADAPTER, ticket, list("\0".join(adapter).encode()))
        self.own.fetch(ticket, adapter, then)

    def take(self, ticket: int, slot: int) -> Exception | None:
        self._order(Order.TAKE_ADAPTER, ticket, [slot])
        return self.own.take(ticket, slot)

    def _order(self, kind: Order, ticket: int, words: list[int]) -> None:
        if self._group.size > 1:
            self._group.broadcast(np.array([kind, ticket, *words], dtype=np.int64))


class Waiting(NamedTuple):
    """A request that waits for its adapter."""

    request: EngineRequest
    listener: StepListener
    arrived_s: float


class AdapterDesk:
    """Desk of adapters: the requests that wait for one, and the slot that holds each. Not thread-safe."""

    def __init__(
        self,
        num_slots: int,
        slots: dict[str, int],
        in_use: Callable[[], set[str]],
        fetch: Callable[[int, Adapter, Callable[[], None]], None],
        take: Callable[[int, int], Exception | None],
        later: Callable[[int], Callable[[], None]],
    ) -> None:
        """`slots`: the scheduler's, of resident adapters by digest, in the order of last use. `in_use`: digests of open
        requests. `later(ticket)` makes what a thread calls when a load is over: it has `loaded` called.
        """
        self._free = list(range(num_slots, 0, -1))
        self._slots = slots
        self._in_use = in_use
        self._fetch, self._take, self._later = fetch, take, later
        self._loading: dict[int, Adapter] = {}
        self._num_loads = 0
        self.waiting: dict[Hashable, Waiting] = {}
        """Requests by attempt, in order of arrival."""
        self._full: dict[str, Adapter] = {}  # that are to be loaded once there is a slot

    def is_ready(self, adapter: Adapter) -> bool:
        """Whether it is resident. That counts as a use."""
        slot = self._slots.pop(adapter.digest, None)
        if slot is None:
            return False
        self._slots[adapter.digest] = slot
        return True

    def hold(self, attempt: Hashable, waiting: Waiting) -> None:
        """Holds a request until its adapter is resident, which is loaded if no other request has it loaded."""
        adapter = waiting.request.adapter
        assert adapter is not None
        self.waiting[attempt] = waiting
        if all(one.digest != adapter.digest for one in (*self._loading.values(), *self._full.values())):
            self._full[adapter.digest] = adapter
            self.advance()

    def advance(self) -> None:
        """Begins the loads that there are slots for. To be called when a request has ended."""
        for digest, adapter in list(self._full.items()):
            if all(one.request.adapter_digest != digest for one in self.waiting.values()):
                del self._full[digest]
            elif self._has_slot():
                del self._full[digest]
                self._num_loads += 1
                self._loading[self._num_loads] = adapter
                self._fetch(self._num_loads, adapter, self._later(self._num_loads))

    @property
    def has_full(self) -> bool:
        """Whether an adapter waits for a slot."""
        return bool(self._full)

    def loaded(self, ticket: int) -> tuple[list[tuple[Hashable, Waiting]], HoldfastError | None]:
        """Takes what was loaded, between two steps: requests that waited for it, and why they cannot go on, if so."""
        adapter = self._loading.pop(ticket)
        slot = self._free.pop()
        failure = self._take(ticket, slot)
        if failure is None:
            self._slots[adapter.digest] = slot
        else:
            self._free.append(slot)
        ready = [(key, one) for key, one in self.waiting.items() if one.request.adapter_digest == adapter.digest]
        for attempt, _ in ready:
            del self.waiting[attempt]
        return ready, None if failure is None else _refusal(adapter, failure)

    def _has_slot(self) -> bool:
        """Whether there is a slot beside those that are promised; gives up the one used least recently if need be."""
        if len(self._free) > len(self._loading):
            return True
        in_use = self._in_use()
        unused = next((digest for digest in self._slots if digest not in in_use), None)
        if unused is None:
            return False
        self._free.append(self._slots.pop(unused))
        return True


def _refusal(adapter: Adapter, failure: Exception) -> HoldfastError:
    if isinstance(failure, HoldfastError):
        return InvalidRequestError("model", adapter.name, str(failure))
    logger.error("adapter %s in %s", adapter.name, adapter.path, exc_info=failure)
    return InvalidRequestError("model", adapter.name, f"the adapter in {adapter.path} could not be loaded: {failure}")

"""Adapters on the ranks of a replica: how all of them load one beside their steps.

desk (`held_requests.py`): requests wait ─► order FETCH ─► each rank reads and packs on a thread ─► order TAKE
between two steps ─► the slot holds it on all ranks, or on none ─► the requests go on
"""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Final

import numpy as np
import torch

from holdfast.worker.adapter import Adapter
from holdfast.worker.distributed.tensor_parallel import Message, TensorParallelGroup
from holdfast.worker.engine.rank_orders import Order
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.cpu.adapters import PackedAdapter
from holdfast.worker.executors.cpu.executor import CpuExecutor
from holdfast.worker.models.adapter_folder import read_adapter
from holdfast.worker.models.adapter_places import AdapterPlaces

logger = logging.getLogger(__name__)

_HEADER: Final = 2  # numbers before the adapter's text: kind, ticket


class AdapterGoneError(ConfigurationError):
    """The folder of an adapter holds another one now. The message names both digests."""


class RankAdapters:
    """One rank's part: reads, checks and packs an adapter on a thread, and puts it in a slot."""

    def __init__(self, executor: Callable[[], CpuExecutor], places: AdapterPlaces, group: TensorParallelGroup) -> None:
        """`executor`: of the weights that are served now."""
        self._executor = executor
        self._places = places
        self._group = group
        self._loads: dict[int, Future[PackedAdapter]] = {}

    def load(self, adapter: Adapter) -> PackedAdapter:
        """Loads this rank's share. Raises `ConfigurationError` for an adapter that cannot be served."""
        folder = self._places.named(read_adapter(adapter.name, adapter.path))
        if folder.digest != adapter.digest:
            raise AdapterGoneError(
                f"{folder.given}: it holds {folder.digest[:16]} now, and the request is for {adapter.digest[:16]}; "
                "load the adapter again, under this name or another"
            )
        executor = self._executor()
        packed = executor.pack_adapter(self._places.apply(folder))
        if not self._places.prove(folder, executor.dtype, packed.added):
            logger.warning("%s: it adds nothing but zeros, so that outputs are those of the model alone", folder.given)
        return packed

    def load_named(self, folders: Mapping[str, str]) -> tuple[Adapter, ...]:
        """Loads each adapter of the settings once, as a check at the start, and returns them. Raises
        `ConfigurationError`.
        """
        found = []
        for name, path in folders.items():
            adapter = Adapter.in_folder(name, path)
            self.load(adapter)
            found.append(adapter)
        return tuple(found)

    def fetch(self, ticket: int, adapter: Adapter, then: Callable[[], None] = lambda: None) -> None:
        """Begins to load, on a thread; calls `then` there when that is over."""
        future = self._loads[ticket] = Future[PackedAdapter]()

        def load() -> None:
            try:
                future.set_result(self.load(adapter))
            except BaseException as error:  # noqa: BLE001 - `take` raises it, or reports it to the leader's requests
                future.set_exception(error)
            then()

        threading.Thread(target=load, name="adapter", daemon=True).start()

    def take(self, ticket: int, slot: int) -> Exception | None:
        """Puts the loaded adapter in a slot if all ranks have it; otherwise returns the reason, as this rank knows
        it.
        """
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

"""Adapters on the ranks of a replica: how all of them load one beside their steps.

desk (`held_requests.py`): requests wait ─► order FETCH ─► each rank reads and packs on a thread ─► order TAKE
between two steps ─► the slot holds it on all ranks, or on none ─► the requests go on
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
import torch

from holdfast.worker.adapter import Adapter, described, files_in
from holdfast.worker.engine.rank_orders import Order
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.tensor_parallel import Message, TensorParallelGroup
from holdfast.worker.models.adapter_folder import AdapterFolder, AdapterReader, FormKey
from holdfast.worker.models.adapter_places import AdapterPlaces
from holdfast.worker.models.executor_protocols import AdaptingExecutor, PackedAdapter

logger = logging.getLogger(__name__)

_MOST_PLANS: Final = 8
"""Forms of adapters whose plans an executor keeps."""
_SOON_S: Final = 1.0
"""An adapter that was loaded for a request is asked for within this time, if at all."""
_HEADER: Final = 2  # numbers before the adapter's text: kind, ticket


class AdapterGoneError(ConfigurationError):
    """The folder of an adapter holds another one now. The message names both digests."""


class _Ahead(NamedTuple):
    """The last adapter that was loaded before it was asked for."""

    marks: tuple[object, ...]
    digest: str
    executor: ReferenceType[AdaptingExecutor]
    loaded: "Future[PackedAdapter] | None"
    """None: it was fetched."""
    at_s: float

    @property
    def is_awaited(self) -> bool:
        """Whether it may still be fetched."""
        return self.loaded is not None and time.monotonic() - self.at_s < _SOON_S


def _marks(name: str, path: str) -> tuple[object, ...]:
    """Marks of a folder's files, which change with them. Raises `ConfigurationError`."""
    files = [file.stat() for file in files_in(described(name, path), path)]
    return name, path, *((one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in files)


def _run(future: "Future[PackedAdapter]", load: Callable[[], PackedAdapter]) -> None:
    """Sets the result, or the error."""
    try:
        future.set_result(load())
    except BaseException as error:  # noqa: BLE001 - `take` raises it, or reports it to the leader's requests
        future.set_exception(error)


def _check_digest(folder: AdapterFolder, adapter: Adapter) -> None:
    """The digest is computed beside the other work, and waited for last."""
    if folder.digest != adapter.digest:
        raise AdapterGoneError(
            f"{folder.given}: it holds {folder.digest[:16]} now, and the request is for {adapter.digest[:16]}; "
            "load the adapter again, under this name or another"
        )


class RankAdapters:
    """One rank's part: reads, checks and packs an adapter on a thread, and puts it in a slot."""

    def __init__(
        self, executor: Callable[[], AdaptingExecutor], places: AdapterPlaces, group: TensorParallelGroup
    ) -> None:
        """`executor`: of the weights that are served now."""
        self._executor = executor
        self._places = places
        self._group = group
        self._loads: dict[int, Future[PackedAdapter]] = {}
        self._ahead: _Ahead | None = None
        self._reader = AdapterReader()
        self._plans = WeakKeyDictionary[AdaptingExecutor, dict[FormKey, Any]]()

    def load_ahead(self, name: str, path: str, *, replaces: bool = True) -> Adapter:
        """The adapter that lies in a folder now. If its files have changed since the last call, packs and proves it,
        from the bytes of its digest, so that `fetch` does not read it again; not where there are other ranks, for which
        all would have to wait, and where it does not replace one not while another waits to be fetched: many new ones
        come at a time. Raises `ConfigurationError` where it cannot be read; the request for it is refused for other
        faults.
        """
        marks, ahead, executor = _marks(name, path), self._ahead, self._executor()
        is_known = ahead is not None and ahead.marks == marks
        if self._group.size > 1 or is_known or (ahead is not None and ahead.is_awaited and not replaces):
            return Adapter.in_folder(name, path)
        loaded: Future[PackedAdapter] = Future()
        try:
            folder = self._places.named(self._reader.read(name, path))
            _run(loaded, lambda: self._packed(folder))
            digest = folder.digest
        except ConfigurationError:
            return Adapter.in_folder(name, path)
        self._ahead = _Ahead(marks, digest, ref(executor), loaded, time.monotonic())
        return Adapter(name, digest, str(files_in(folder.given, path)[0].parent))

    def _take_ahead(self, adapter: Adapter) -> "Future[PackedAdapter] | None":
        """An adapter that was loaded before, once."""
        ahead = self._ahead
        if ahead is None or ahead.digest != adapter.digest or ahead.executor() is not self._executor():
            return None
        self._ahead = ahead._replace(loaded=None)
        return ahead.loaded

    def load(self, adapter: Adapter) -> PackedAdapter:
        """Loads this rank's share. Raises `ConfigurationError` for an adapter that cannot be served."""
        folder = self._places.named(self._reader.read(adapter.name, adapter.path))
        try:
            packed = self._packed(folder)
        except ConfigurationError:
            _check_digest(folder, adapter)  # of another content no fault is told
            raise
        _check_digest(folder, adapter)
        return packed

    def _packed(self, folder: AdapterFolder) -> PackedAdapter:
        executor = self._executor()
        self._places.check_copies(folder)
        packed: PackedAdapter = executor.pack_adapter(self._plan(folder, executor), folder.content)
        if not self._places.prove(folder, packed.differences, executor.dtype):
            logger.warning("%s: it adds nothing but zeros, so that outputs are those of the model alone", folder.given)
        folder.content.let_go()
        return packed

    def _plan(self, folder: AdapterFolder, executor: AdaptingExecutor) -> Any:
        """Plan of adapters of its form; the last ones are kept."""
        plans = self._plans.setdefault(executor, {})
        plan = plans.get(folder.key)
        if plan is None:
            plan = executor.plan_adapter(self._places.apply(folder))
            if len(plans) >= _MOST_PLANS:
                plans.clear()
            plans[folder.key] = plan
        return plan

    def load_named(self, folders: Mapping[str, str], pinned: Collection[str] = ()) -> tuple[Adapter, ...]:
        """Loads each adapter of the settings once, as a check at the start, and returns them. `pinned` are names.

        Raises `ConfigurationError`.
        """
        found = []
        for name, path in folders.items():
            adapter = Adapter.in_folder(name, path, pinned=name in pinned)
            self.load(adapter)
            found.append(adapter)
        return tuple(found)

    def fetch(self, ticket: int, adapter: Adapter, then: Callable[[], None] = lambda: None) -> None:
        """Begins to load, on a thread, unless it was loaded ahead; calls `then` when that is over, there or here."""
        future = self._take_ahead(adapter)
        is_new = future is None
        self._loads[ticket] = future = Future() if future is None else future
        future.add_done_callback(lambda _: then())
        if is_new:
            load = partial(_run, future, lambda: self.load(adapter))
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
            name, digest, path = bytes(order[_HEADER:].tolist()).decode().split("\0")
            self.fetch(ticket, Adapter(name, digest, path))
        else:
            self.take(ticket, int(order[_HEADER]))


class AdapterOrders:
    """The leader's orders to all ranks, its own part included."""

    def __init__(self, own: RankAdapters, group: TensorParallelGroup) -> None:
        self.own = own
        self._group = group

    def fetch(self, ticket: int, adapter: Adapter, then: Callable[[], None]) -> None:
        self._order(Order.FETCH_ADAPTER, ticket, list("\0".join((adapter.name, adapter.digest, adapter.path)).encode()))
        self.own.fetch(ticket, adapter, then)

    def take(self, ticket: int, slot: int) -> Exception | None:
        self._order(Order.TAKE_ADAPTER, ticket, [slot])
        return self.own.take(ticket, slot)

    def _order(self, kind: Order, ticket: int, words: list[int]) -> None:
        if self._group.size > 1:
            self._group.broadcast(np.array([kind, ticket, *words], dtype=np.int64))

"""Requests that an engine holds until their prefix's blocks (from the disk or another replica) or their LoRA adapter
have been loaded. Without IO.

A slot is given to another adapter only when its current adapter has no open request, and is not pinned.
"""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from holdfast.worker.adapter import Adapter
from holdfast.worker.engine.block_tier import BlockTier
from holdfast.worker.engine.inbox import OutputQueue
from holdfast.worker.engine.restore import Restore
from holdfast.worker.errors import HoldfastError, InvalidRequestError
from holdfast.worker.request import EngineRequest
from holdfast.worker.step_update import FetchedAhead, StepListener

logger = logging.getLogger(__name__)


class HeldRequest(NamedTuple):
    """A request that is not with the scheduler yet."""

    request: EngineRequest
    listener: StepListener
    arrived_s: float
    restore: Restore | None = None
    """The restore that it waits for; None: it waits for its adapter."""


class HeldRequests:
    """The held requests of an engine, by the keys of their attempts."""

    def __init__(self) -> None:
        self.tier: BlockTier | None = None
        """Block tier, if blocks can be moved. Set before any request comes."""
        self.adapters: AdapterDesk | None = None
        """Desk of adapters, where they are served. Set before any request comes."""
        self.for_blocks: dict[Hashable, HeldRequest] = {}
        """Requests that wait for blocks. To be read only."""
        self._ahead: list[tuple[Restore | int, StepListener, Hashable]] = []
        """Blocks that are fetched ahead, or tokens that are here already; the listener to notify, and the attempt."""

    @property
    def for_adapters(self) -> dict[Hashable, HeldRequest]:
        """Requests that wait for adapters. To be read only."""
        return {} if self.adapters is None else self.adapters.waiting

    def __bool__(self) -> bool:
        return bool(self.for_blocks or self.for_adapters)

    def hold_for_blocks(self, attempt: Hashable, request: EngineRequest, listener: StepListener, now: float) -> bool:
        """Whether a request is held from now on, for a part of its prefix that is brought back."""
        restore = None if self.tier is None else self.tier.restores.restore_for(request, now)
        if restore is not None:
            self.for_blocks[attempt] = HeldRequest(request, listener, now, restore)
        return restore is not None

    def fetch_ahead(self, request: EngineRequest, now: float, listener: StepListener | None, attempt: Hashable) -> None:
        """Fetches blocks of a request that comes later, as far as there is room. The listener is notified."""
        restore = 0 if self.tier is None else self.tier.restores.fetch_ahead(request, now)
        if listener is not None:
            self._ahead.append((restore, listener, attempt))

    def tell_fetched(self, output_queues: Mapping[StepListener, OutputQueue]) -> bool:
        """Tells listeners of fetched blocks that are here, or do not come. Whether there were any."""
        still_open = []
        for one in self._ahead:
            restore, listener, attempt = one
            if isinstance(restore, Restore) and self.tier is not None and self.tier.restores.is_open(restore):
                still_open.append(one)
            elif (output_queue := output_queues.get(listener)) is not None:
                num_tokens = restore.num_cached_tokens if isinstance(restore, Restore) else restore
                output_queue.fetched_ahead.append(FetchedAhead(attempt, num_tokens))
        has_told = len(still_open) < len(self._ahead)
        self._ahead = still_open
        return has_told

    def has_blocks(self, step_s: float | None, now: float) -> list[Hashable]:
        """Attempts whose restores are over, or given up. `step_s` as for `Restores.advance`."""
        if self.tier is None:
            return []
        restores = self.tier.restores.advance(step_s, now)
        for restore in restores:
            self.tier.takeover.note_over(restore, now)
        return [attempt for restore in restores for attempt, held in self.for_blocks.items() if held.restore is restore]

    def take(self, attempt: Hashable) -> HeldRequest:
        """Takes out a request that waits for blocks. A restore ends with the last request that waits for it."""
        held = self.for_blocks.pop(attempt)
        if all(other.restore is not held.restore for other in self.for_blocks.values()):
            assert self.tier is not None, "blocks are brought back"
            assert held.restore is not None, "it waits for blocks"
            self.tier.restores.end(held.restore)
        return held

    def drop(self, listener: StepListener) -> None:
        """Takes out all of a listener."""
        for attempt in [attempt for attempt, held in self.for_blocks.items() if held.listener is listener]:
            self.take(attempt)
        for attempt in [attempt for attempt, held in self.for_adapters.items() if held.listener is listener]:
            del self.for_adapters[attempt]


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
        clock: Callable[[], float],
    ) -> None:
        """`slots`: the scheduler's, of resident adapters by digest, in the order of last use. `in_use`: digests of open
        requests. `later(ticket)` returns the callback for the end of a load: it runs `loaded` on the engine's thread.
        `clock`: in seconds.
        """
        self._free = list(range(num_slots, 0, -1))
        self._slots = slots
        self._in_use = in_use
        self._fetch, self._take, self._later = fetch, take, later
        self._clock = clock
        self._loading: dict[int, Adapter] = {}
        self._began_s: dict[int, float] = {}
        self._num_loads = 0
        self.num_loaded, self.load_s = 0, 0.0
        """Adapters that were made resident, and the seconds that the last one took to load."""
        self._changes: dict[str, bool] = {}  # whether an adapter is resident or loading, where that has changed
        self.waiting: dict[Hashable, HeldRequest] = {}
        """Requests by attempt, in order of arrival."""
        self._full: dict[str, Adapter] = {}  # to be loaded once there is a slot
        self._most_kept = num_slots - 1
        self._kept: dict[str, Adapter] = {}  # those that stay resident, by digest

    @property
    def digests(self) -> list[str]:
        """Digests of the adapters that are resident or being loaded."""
        return [*self._slots, *(adapter.digest for adapter in self._loading.values())]

    def take_changes(self) -> dict[str, bool]:
        """Changes of `digests` since the last call: whether each is among them now."""
        changes, self._changes = self._changes, {}
        return changes

    def keep(self, adapters: Sequence[Adapter]) -> None:
        """Adapters that stay resident from now on, in place of those before: missing ones are loaded. One slot is left
        for others.
        """
        for one in adapters[self._most_kept :]:
            logger.warning("adapter %s is not pinned: of %d slots one must stay free", one.name, self._most_kept + 1)
        self._kept = {one.digest: one for one in adapters[: self._most_kept]}
        missing = self._kept.keys() - self._full.keys() - set(self.digests)
        self._full |= {digest: one for digest, one in self._kept.items() if digest in missing}
        self.advance()

    def is_ready(self, adapter: Adapter) -> bool:
        """Whether it is resident. That counts as a use."""
        slot = self._slots.pop(adapter.digest, None)
        if slot is None:
            return False
        self._slots[adapter.digest] = slot
        return True

    def hold(self, attempt: Hashable, held: HeldRequest) -> None:
        """Holds a request until its adapter is resident. Begins the load if no other request has."""
        adapter = held.request.adapter
        assert adapter is not None
        self.waiting[attempt] = held
        if all(one.digest != adapter.digest for one in (*self._loading.values(), *self._full.values())):
            self._full[adapter.digest] = adapter
            self.advance()

    def advance(self) -> None:
        """Begins the loads that there are slots for. To be called when a request has ended."""
        for digest, adapter in list(self._full.items()):
            wanted = (one.request.adapter_digest for one in self.waiting.values())
            if digest not in self._kept and digest not in wanted:
                del self._full[digest]
            elif self._has_slot():
                del self._full[digest]
                self._num_loads += 1
                self._loading[self._num_loads] = adapter
                self._began_s[self._num_loads] = self._clock()
                self._changes[digest] = True
                self._fetch(self._num_loads, adapter, self._later(self._num_loads))

    @property
    def has_full(self) -> bool:
        """Whether an adapter waits for a slot."""
        return bool(self._full)

    def loaded(self, ticket: int) -> tuple[list[tuple[Hashable, HeldRequest]], HoldfastError | None]:
        """Takes a loaded adapter over, between two steps. Returns the requests that waited for it, and the error if it
        cannot be used.
        """
        adapter, began_s = self._loading.pop(ticket), self._began_s.pop(ticket)
        slot = self._free.pop()
        failure = self._take(ticket, slot)
        if failure is None:
            self._slots[adapter.digest] = slot
            self.num_loaded, self.load_s = self.num_loaded + 1, self._clock() - began_s
        else:
            self._free.append(slot)
            self._changes[adapter.digest] = False
            if adapter.digest in self._kept:
                logger.error("adapter %s stays out of memory, although it is pinned: %s", adapter.name, failure)
        ready = [(key, one) for key, one in self.waiting.items() if one.request.adapter_digest == adapter.digest]
        for attempt, _ in ready:
            del self.waiting[attempt]
        return ready, None if failure is None else _refusal(adapter, failure)

    def _has_slot(self) -> bool:
        """Whether there is a slot besides the reserved ones; frees the least recently used one that is not pinned if
        necessary.
        """
        if len(self._free) > len(self._loading):
            return True
        in_use = self._in_use()
        unused = next((one for one in self._slots if one not in in_use and one not in self._kept), None)
        if unused is None:
            return False
        self._free.append(self._slots.pop(unused))
        self._changes[unused] = False
        return True


def _refusal(adapter: Adapter, failure: Exception) -> HoldfastError:
    if isinstance(failure, HoldfastError):
        return InvalidRequestError("model", adapter.name, str(failure))
    logger.error("adapter %s in %s", adapter.name, adapter.path, exc_info=failure)
    return InvalidRequestError("model", adapter.name, f"the adapter in {adapter.path} could not be loaded: {failure}")

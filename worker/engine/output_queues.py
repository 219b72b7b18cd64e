"""Output queues: per listener, the deltas, rejections and prefix-cache changes that it has not been sent yet."""

from collections.abc import Hashable, Iterable, Sequence

from holdfast.worker.block_hash import short_hash
from holdfast.worker.cache.block_pool import BlockStored, CacheEvent
from holdfast.worker.errors import HoldfastError
from holdfast.worker.request import EngineLoad, TokenDelta
from holdfast.worker.stats import EngineStats
from holdfast.worker.step_update import NO_CHANGES, CacheChanges, Rejection, StepListener, StepUpdate


class OutputQueues:
    """One output queue for each attached listener. Not thread-safe, but for `listeners`."""

    def __init__(self) -> None:
        self._of: dict[StepListener, OutputQueue] = {}
        self.cache_feeds: list[CacheFeed] = []
        """Of the listeners that follow the cache. To be read only."""
        self._owner: dict[Hashable, StepListener] = {}  # by the keys of requests that have not ended

    @property
    def listeners(self) -> list[StepListener]:
        """The listeners that are attached now, in order of attaching."""
        return list(self._of)

    def items(self) -> list[tuple[StepListener, "OutputQueue"]]:
        """All listeners with their output queues, as they are now: detaching some meanwhile does no harm."""
        return list(self._of.items())

    def attach(self, listener: StepListener) -> None:
        """Does nothing if it is attached already."""
        self._of.setdefault(listener, OutputQueue())

    def detach(self, listener: StepListener) -> list[Hashable]:
        """Takes its queue away; returns the requests that it leaves behind, whose last deltas will reach nobody."""
        output_queue = self._of.pop(listener, None)
        if output_queue is not None and output_queue.cache is not None:
            self.cache_feeds.remove(output_queue.cache)
        return [attempt for attempt, owner in self._owner.items() if owner is listener]

    def is_attached(self, listener: StepListener) -> bool:
        return listener in self._of

    @property
    def num_owned(self) -> int:
        """Requests whose last delta or rejection is still to come."""
        return len(self._owner)

    def own(self, attempt: Hashable, listener: StepListener) -> None:
        """From now on, deltas and rejections of the request go to `listener`."""
        self._owner[attempt] = listener

    def owner(self, attempt: Hashable) -> StepListener:
        """Of a request that has not ended."""
        return self._owner[attempt]

    def put(self, deltas: Iterable[TokenDelta]) -> int:
        """Keeps each delta for the owner of its request. Returns how many tokens they have."""
        owners, output_queues = self._owner, self._of
        num_tokens = 0
        for delta in deltas:
            num_tokens += len(delta.token_ids)
            attempt = delta.attempt
            listener = owners[attempt] if delta.finish_reason is None else owners.pop(attempt)
            output_queue = output_queues.get(listener)
            if output_queue is not None:
                output_queue.deltas.append(delta)
        return num_tokens

    def reject(self, attempt: Hashable, error: HoldfastError) -> None:
        """Keeps a rejection of an owned request, which ends it."""
        self.refuse(attempt, error, self._owner.pop(attempt))

    def refuse(self, attempt: Hashable, error: HoldfastError, listener: StepListener) -> None:
        """Keeps a rejection of a request that was never owned."""
        output_queue = self._of.get(listener)
        if output_queue is not None:
            output_queue.rejections.append(Rejection(attempt=attempt, error=error))

    def follow_cache(self, listener: StepListener, block_hashes: Iterable[bytes]) -> None:
        """From now on an attached listener gets the changes of the cache, which holds `block_hashes` now."""
        output_queue = self._of.get(listener)
        if output_queue is not None:
            if output_queue.cache is not None:
                self.cache_feeds.remove(output_queue.cache)
            output_queue.cache = CacheFeed(block_hashes)
            self.cache_feeds.append(output_queue.cache)

    def note_cache_events(self, events: Sequence[CacheEvent]) -> None:
        """Keeps the cache's events for the listeners that follow it."""
        for feed in self.cache_feeds:
            feed.note(events)

    def check_integrity(self) -> None:
        """Raise AssertionError if a request is kept for one who has left."""
        left_behind = [attempt for attempt, owner in self._owner.items() if owner not in self._of]
        assert not left_behind, f"nobody waits for {left_behind}"


class OutputQueue:
    """What one listener has not been sent yet."""

    def __init__(self) -> None:
        self.is_new = True
        self.deltas: list[TokenDelta] = []
        self.rejections: list[Rejection] = []
        self.cache: CacheFeed | None = None

    @property
    def has_news(self) -> bool:
        return bool(self.is_new or self.deltas or self.rejections or (self.cache and self.cache.has_news))

    def take(self, step_id: int, load: EngineLoad, stats: EngineStats | None) -> StepUpdate:
        update = StepUpdate(
            step_id=step_id,
            deltas=tuple(self.deltas),
            rejections=tuple(self.rejections),
            load=load,
            cache=self.cache.take() if self.cache else NO_CHANGES,
            stats=stats,
        )
        self.is_new, self.deltas, self.rejections = False, [], []
        return update


class CacheFeed:
    """The prefix-cache changes that one listener has not been sent yet: first the whole cache, then what changed.

    A block's latest event replaces an earlier one, so events need no order, and what is kept is bounded by the number
    of blocks that were stored or evicted since the last `take`.
    """

    def __init__(self, block_hashes: Iterable[bytes]) -> None:
        """`block_hashes` are those of all blocks in the cache now."""
        self._is_stored = dict.fromkeys(map(short_hash, block_hashes), True)

    def note(self, events: Iterable[CacheEvent]) -> None:
        """Take in the events since the last call, in order."""
        for event in events:
            self._is_stored[short_hash(event.block_hash)] = isinstance(event, BlockStored)

    @property
    def has_news(self) -> bool:
        return bool(self._is_stored)

    def take(self) -> CacheChanges:
        """The changes since the last call."""
        changes, self._is_stored = self._is_stored, {}
        return CacheChanges(
            stored=[block for block, is_stored in changes.items() if is_stored],
            evicted=[block for block, is_stored in changes.items() if not is_stored],
        )

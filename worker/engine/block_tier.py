"""Block tier: decides which blocks go from the prefix cache to the store below it, and tracks the store's content;
without IO. Without a store, blocks go to other replicas and come from them alone.

Cached blocks that the store lacks are copied to it between two steps, in the order in which they were computed, within
a time budget: a share of the steps' time, and all of it while nothing runs. So nearly all blocks are stored long before
they are evicted; a block that is evicted earlier is lost.

`restores.py` brings them back, and `sendings.py` sends blocks to other replicas.

`PinTakeover` fetches the pinned prefixes of another replica that is leaving: a few at a time, as restores, after all
blocks that requests wait for. The fetched blocks stay pinned for the rest of the pin's time, within the tenant's budget
on this replica.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple

from holdfast.worker.cache.block_pool import BlockAllocator
from holdfast.worker.cache.prefix_cache import BlockEvicted, BlockStored, CacheEvent
from holdfast.worker.cache.state_slots import StateSlots
from holdfast.worker.engine.restore import Restore
from holdfast.worker.engine.restores import Restores
from holdfast.worker.engine.sendings import Sendings
from holdfast.worker.engine.tier_mover import KV, PREFIX_ENDS, STATE, Mover, Place, TierShape
from holdfast.worker.request import PinnedPrefix, Priority
from holdfast.worker.scheduler.kept_prefixes import Pinning
from holdfast.worker.step_update import EngineStats

MAX_OPEN: Final = 4
"""Prefixes that are brought at a time."""


class _Waiting(NamedTuple):
    prefix: PinnedPrefix
    source: str
    until_s: float


class PinTakeover:
    """Takes pins over on the leader's engine. Used by one thread."""

    def __init__(self, restores: Restores, pinning: Pinning) -> None:
        self._restores = restores
        self._pinning = pinning
        self._waiting: deque[_Waiting] = deque()
        self._open: dict[int, _Waiting] = {}  # by the tickets of their restores
        self.num_taken = 0
        """Prefixes that were pinned here."""

    def forget(self, hashes: Collection[bytes], tenant: str) -> None:
        """The tenant's prefixes that end with these blocks are not to be pinned; no hashes: none of its prefixes is."""

        def is_wanted(one: _Waiting) -> bool:
            return one.prefix.tenant != tenant or bool(hashes and one.prefix.hashes[-1] not in hashes)

        self._waiting = deque(filter(is_wanted, self._waiting))
        self._open = {ticket: one for ticket, one in self._open.items() if is_wanted(one)}

    def take(self, prefixes: Iterable[PinnedPrefix], source: str, now: float) -> None:
        """Takes over the pinned prefixes of the replica at this address."""
        self._waiting += [_Waiting(one, source, now + one.ttl_s) for one in prefixes]
        self._go_on(now)

    def note_over(self, restore: Restore, now: float) -> None:
        """A restore is over, as far as it went."""
        taken = self._open.pop(restore.ticket, None)
        if taken is not None:
            self._keep(taken, now)
            self._go_on(now)

    def give_up(self) -> None:
        """Ends all: the cache belongs to other weights now."""
        self._waiting.clear()
        self._open.clear()

    def _go_on(self, now: float) -> None:
        while self._waiting and len(self._open) < MAX_OPEN:
            taken = self._waiting.popleft()
            restore = self._restores.bring(taken.prefix, taken.source, now) if now < taken.until_s else None
            if restore is None:
                self._keep(taken, now)
            else:
                self._open[restore.ticket] = taken

    def _keep(self, taken: _Waiting, now: float) -> None:
        self.num_taken += now < taken.until_s
        self._pinning.keep(taken.prefix._replace(ttl_s=taken.until_s - now), now)


SHARE: Final = 0.015
"""Share of the steps' time that copying blocks to the store may cost them."""
MAX_BUDGET_S: Final = 0.1
"""Most seconds of it that are saved up."""
IDLE_BYTES: Final = 16 << 20
"""Copied to the store at a time while nothing runs."""
MAX_LEFT_OUT: Final = 1024
"""Blocks whose successors are not copied: the last ones are remembered."""
MATURE_TURNS: Final = 64
"""Turns that a snapshot must outlive to be copied while others run: most of them are soon replaced by the next."""


class BlockTier:
    """Block tier of the leader's engine. Used by one thread."""

    def __init__(
        self,
        allocator: BlockAllocator,
        slots: StateSlots | None,
        mover: Mover,
        shape: TierShape,
        computing_s: Callable[[int, int], float],
        num_awaited_blocks: Callable[[Priority], int],
        can_preempt: Callable[[Priority], bool],
        pinning: Pinning,
        *,
        has_store: bool = True,
    ) -> None:
        """`computing_s`, `num_awaited_blocks` and `can_preempt` as for `Restores`."""
        self.has_store = has_store
        self.moves: set[int] = set()
        """Restores and sendings that are open; empty while there is nothing to tend without a store."""
        self._num_lost_blocks = self._turn = 0
        self._budget_s = 0.0
        self._allocator = allocator
        self._cache = allocator.prefix_cache
        self._slots = slots
        self._mover = mover
        self._shape = shape
        self._stored: set[bytes] = set()
        self._changes: dict[bytes, list[CacheEvent]] = {KV: [], STATE: []}
        self._to_store: OrderedDict[bytes, int] = OrderedDict()
        """Blocks of keys and values that the store has not; and states, each with the turn since when it is here."""
        self._states_to_store: OrderedDict[bytes, int] = OrderedDict()
        self._left_out: OrderedDict[bytes, None] = OrderedDict()
        of_engine = computing_s, num_awaited_blocks, can_preempt, self.moves
        self.restores = Restores(allocator, slots, mover, shape, self._stored, self._forget, *of_engine)
        self.sendings = Sendings(allocator.prefix_cache, slots, mover, shape, self.moves)
        self.takeover = PinTakeover(self.restores, pinning)
        self._to_keep: deque[tuple[list[bytes], str, float]] = deque()
        if has_store:
            pinning.on_pinned = self._keep_below
        pinning.on_unpinned = self._note_unpinned

    # --- what can be had ---

    def learn(self, came: Iterable[bytes], gone: Iterable[bytes]) -> None:
        """The store has gained, and lost, the blocks of these names."""
        for name in came:
            if name not in self._stored:
                self._stored.add(name)
                self._to_store.pop(name, None)
                self._states_to_store.pop(name, None)
                self._tell(name, BlockStored(block_hash=name[1:], parent_hash=b""))
        for name in gone:
            self._forget(name)

    def forget(self) -> None:
        """Forgets its blocks: cached and stored blocks belong to other weights now."""
        self._to_store.clear()
        self._states_to_store.clear()
        for name in list(self._stored):
            self._forget(name)
        self.takeover.give_up()
        self.restores.give_up()
        self.sendings.end_all()

    @property
    def block_hashes(self) -> Iterable[bytes]:
        """Hashes of the keys and values in the store."""
        return (name[1:] for name in self._stored if name.startswith(KV))

    @property
    def snapshot_hashes(self) -> Iterable[bytes]:
        """Hashes of the last blocks before the snapshots in the store."""
        return (name[1:] for name in self._stored if name.startswith(STATE))

    def seen(
        self, events: Iterable[CacheEvent], state_events: Iterable[CacheEvent]
    ) -> tuple[list[CacheEvent], list[CacheEvent]]:
        """Changes of the blocks that can be had, here or from the store, given these changes of the caches."""
        changes, self._changes = self._changes, {KV: [], STATE: []}
        blocks = [event for event in events if not self._is_kept(KV, event)]
        states = [event for event in state_events if not self._is_kept(STATE, event)]
        return [*blocks, *changes[KV]], [*states, *changes[STATE]]

    def _is_kept(self, kind: bytes, event: CacheEvent) -> bool:
        return isinstance(event, BlockEvicted) and kind + event.block_hash in self._stored

    def _tell(self, name: bytes, event: CacheEvent) -> None:
        kind, block_hash = name[:1], name[1:]
        if kind == KV:
            is_here = self._cache.block_of(block_hash) is not None
        else:
            is_here = self._slots is not None and self._slots.holder_of(block_hash) is not None
        if not is_here:
            self._changes[kind].append(event)

    def _forget(self, name: bytes) -> None:
        if name in self._stored:
            self._stored.discard(name)
            self._tell(name, BlockEvicted(block_hash=name[1:]))

    # --- down ---

    def note(self, events: Iterable[CacheEvent], state_events: Iterable[CacheEvent] = ()) -> None:
        """Takes in the changes of the caches since the last call."""
        for kind, queue, changes in (
            (KV, self._to_store, events),
            (STATE, self._states_to_store, state_events),
        ):
            for event in changes:
                name = kind + event.block_hash
                if isinstance(event, BlockEvicted):
                    self._num_lost_blocks += queue.pop(name, None) is not None and kind == KV
                elif event.parent_hash in self._left_out:
                    self.leave_out(event.block_hash)
                elif name not in self._stored:
                    queue[name] = self._turn

    def leave_out(self, block_hash: bytes) -> None:
        """Keeps the blocks after this block, or this `root_hash`, out of the store, since no later request can use
        them.
        """
        self._left_out[block_hash] = None
        if len(self._left_out) > MAX_LEFT_OUT:
            self._left_out.popitem(last=False)

    def report(self, stats: EngineStats) -> None:
        """Writes its figures into an engine's."""
        counts, shape = self._mover.counts, self._shape
        waiting = len(self._to_store) * shape.block_bytes + len(self._states_to_store) * shape.state_bytes
        stats.disk_backlog_bytes = waiting + counts.staged_bytes
        stats.num_disk_hit_tokens, stats.num_disk_losses = self.restores.num_hit_tokens, self._num_lost_blocks
        stats.num_disk_blocks, stats.disk_bytes = counts.num_blocks, counts.num_bytes
        stats.num_digest_failures, stats.num_disk_errors = counts.num_failures, counts.num_errors
        stats.num_received_tokens = self.restores.num_received_tokens
        stats.received_tokens_from = dict(self.restores.received_from)
        stats.num_cut_transfers = self.restores.num_cut_transfers
        stats.num_sent_blocks = self.sendings.num_sent_blocks
        stats.received_bytes, stats.sent_bytes = counts.num_received_bytes, counts.num_sent_bytes
        stats.received_bytes_per_s = counts.received_bytes_per_s

    def store_some(self, step_s: float | None) -> None:
        """Copies some blocks to the store. `step_s`: how long the last step took; None: nothing runs."""
        self._turn += 1
        while self._to_keep:
            self._mover.keep(*self._to_keep.popleft())
        if step_s is not None:
            self._budget_s = min(MAX_BUDGET_S, self._budget_s + SHARE * step_s)
        if not (self._to_store or self._states_to_store) or not self._mover.has_room:
            return
        each_s = self._mover.counts.copy_s_per_byte + self._mover.counts.write_s_per_byte / self._shape.num_threads
        room = IDLE_BYTES if step_s is None else int(self._budget_s / each_s)
        places = self._next_places(room, is_idle=step_s is None)
        if places:
            num_bytes = sum(self._shape.bytes_of(name) for name, _ in places)
            self._budget_s -= 0.0 if step_s is None else num_bytes * each_s
            self._mover.store(places)

    def _keep_below(self, hashes: Iterable[bytes], state: bytes | None, tenant: str, ttl_s: float) -> None:
        """A prefix was pinned, with a snapshot behind the block of the hash `state`: the store keeps it as long."""
        names = [KV + block_hash for block_hash in hashes]
        self._to_keep.append(([*names, STATE + state] if state else names, tenant, ttl_s))

    def _note_unpinned(self, hashes: Collection[bytes], tenant: str, is_below: bool) -> None:
        """These blocks, and the snapshots behind them, are not to be pinned. None: none of the tenant's. `is_below`: a
        prefix that ends with this block is kept in the store alone.
        """
        self.takeover.forget(hashes, tenant)
        if self.has_store:
            names = [kind + block_hash for block_hash in hashes for kind in (KV, STATE)]
            self._to_keep.append((names, tenant, PREFIX_ENDS if is_below else 0.0))

    def _next_places(self, room: int, *, is_idle: bool) -> list[Place]:
        """The next blocks to copy, at most this number of bytes; at least one block while the engine is idle."""
        places: list[Place] = []
        for queue in (self._to_store, self._states_to_store):
            while queue:
                name, since = next(iter(queue.items()))
                is_young = queue is self._states_to_store and not is_idle and self._turn - since < MATURE_TURNS
                if is_young or (self._shape.bytes_of(name) > room and not (is_idle and not places)):
                    break
                del queue[name]
                place = self._place_of(name)
                if place is not None:
                    places.append((name, place))
                    room -= self._shape.bytes_of(name)
        return places

    def _place_of(self, name: bytes) -> int | None:
        if name.startswith(KV):
            return self._cache.block_of(name[1:])
        return None if self._slots is None else self._slots.holder_of(name[1:])

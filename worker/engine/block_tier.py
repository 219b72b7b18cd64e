"""Block tier: which blocks go from the prefix cache to the store below it, and which come back; without IO.

Down: blocks that the cache has and the store has not are copied to it between two steps, in the order in which they
were computed, as far as a budget of time goes: a share of what the steps take, and all of it while nothing runs. So
nearly all blocks are down long before they are evicted; those that are evicted before are lost.

Up: a request whose prefix goes on in the store is held until its blocks are in the cache, where that is sooner than to
compute them, and then submitted as if it had come just now. It finds them as it finds any cached block: nothing but
the cache knows where they came from. Restores that memory has no room for beside what runs, what waits and other
restores would evict each other's blocks: they wait for room. From its beginning a restore holds a request no longer
than computing would take.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from holdfast.worker.block_hash import HashChain
from holdfast.worker.cache.block_pool import BlockAllocator, BlockEvicted, BlockStored, CacheEvent
from holdfast.worker.cache.state_slots import StateSlots
from holdfast.worker.engine.tier_mover import KV, STATE, Mover, Place, Restore, TierShape
from holdfast.worker.request import EngineRequest
from holdfast.worker.step_plan import StateCopy
from holdfast.worker.step_update import EngineStats

SHARE: Final = 0.015
"""Share of the steps' time that copying blocks to the store may cost them."""
TAKE_SHARE: Final = 0.1
"""Share of the steps' time that copying blocks from the store may cost them, except for one piece each time."""
MOST_S: Final = 0.1
"""Most seconds of either that are saved up."""
IDLE_BYTES: Final = 16 << 20
"""Copied to the store at a time while nothing runs."""
MOST_LEFT_OUT: Final = 1024
"""Blocks whose successors are not copied: the last ones are remembered."""
MATURE_TURNS: Final = 64
"""Turns that a snapshot must outlive to be copied while others run: most of them are soon replaced by the next."""
FIXED_S: Final = 0.002
"""Seconds of a restore besides reading: two threads wait for each other."""
LEAST_S: Final = 0.1
"""A request is held for so long at most, if computing would take less."""
MOST_HELD_S: Final = 30.0
"""And for so long, however long computing would take."""


class BlockTier:
    """Block tier of the leader's engine. Used by one thread."""

    def __init__(
        self,
        allocator: BlockAllocator,
        slots: StateSlots | None,
        mover: Mover,
        shape: TierShape,
        computing_s: Callable[[int, int], float],
    ) -> None:
        """`computing_s`: how long it takes to compute so many tokens of a prompt, from a position on; infinite where
        nothing was measured yet.
        """
        self._num_hit_tokens = self._num_lost_blocks = 0
        self._allocator = allocator
        self._cache = allocator.prefix_cache
        self._slots = slots
        self._mover = mover
        self._shape = shape
        self._computing_s = computing_s
        self._stored: set[bytes] = set()
        self._changes: dict[bytes, list[CacheEvent]] = {KV: [], STATE: []}
        self._to_store: OrderedDict[bytes, int] = OrderedDict()
        """Blocks of keys and values that the store has not; and states, each with the turn since when it is here."""
        self._states_to_store: OrderedDict[bytes, int] = OrderedDict()
        self._left_out: OrderedDict[bytes, None] = OrderedDict()
        self._restores: dict[int, Restore] = {}
        self._num_restores = self._turn = self._num_waiting = 0
        self._budget_s = self._take_budget_s = 0.0

    # --- what can be had ---

    def learn(self, came: Iterable[bytes], gone: Iterable[bytes]) -> None:
        """The store has got, and lost, what has these names."""
        for name in came:
            if name not in self._stored:
                self._stored.add(name)
                self._to_store.pop(name, None)
                self._states_to_store.pop(name, None)
                self._tell(name, BlockStored(block_hash=name[1:], parent_hash=b""))
        for name in gone:
            self._forget(name)

    def forget(self) -> None:
        """Forgets its blocks: what is cached and stored belongs to other weights now."""
        self._to_store.clear()
        self._states_to_store.clear()
        for name in list(self._stored):
            self._forget(name)
        for restore in self._restores.values():
            restore.has_failed = True

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
        """Takes in what has changed in the caches since the last call."""
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
        """Keeps what follows this block, or this `root_hash`, out of the store: nobody will ask for it again."""
        self._left_out[block_hash] = None
        if len(self._left_out) > MOST_LEFT_OUT:
            self._left_out.popitem(last=False)

    def report(self, stats: EngineStats) -> None:
        """Writes its figures into an engine's."""
        counts, shape = self._mover.counts, self._shape
        waiting = len(self._to_store) * shape.block_bytes + len(self._states_to_store) * shape.state_bytes
        stats.disk_backlog_bytes = waiting + counts.staged_bytes
        stats.num_disk_hit_tokens, stats.num_disk_losses = self._num_hit_tokens, self._num_lost_blocks
        stats.num_disk_blocks, stats.disk_bytes = counts.num_blocks, counts.num_bytes
        stats.num_digest_failures, stats.num_disk_errors = counts.num_failures, counts.num_errors

    def store_some(self, step_s: float | None) -> None:
        """Copies some blocks to the store. `step_s`: how long the last step took; None: nothing runs."""
        self._turn += 1
        if step_s is not None:
            self._budget_s = min(MOST_S, self._budget_s + SHARE * step_s)
        if not (self._to_store or self._states_to_store) or not self._mover.has_room:
            return
        each_s = self._mover.counts.copy_s_per_byte + self._mover.counts.write_s_per_byte / self._shape.num_threads
        room = IDLE_BYTES if step_s is None else int(self._budget_s / each_s)
        places = self._next_places(room, is_idle=step_s is None)
        if places:
            num_bytes = sum(self._bytes_of(name) for name, _ in places)
            self._budget_s -= 0.0 if step_s is None else num_bytes * each_s
            self._mover.store(places)

    def _next_places(self, room: int, *, is_idle: bool) -> list[Place]:
        """The next blocks to copy, of so many bytes at most; idle, at least one."""
        places: list[Place] = []
        for queue in (self._to_store, self._states_to_store):
            while queue:
                name, since = next(iter(queue.items()))
                is_young = queue is self._states_to_store and not is_idle and self._turn - since < MATURE_TURNS
                if is_young or (self._bytes_of(name) > room and not (is_idle and not places)):
                    break
                del queue[name]
                place = self._place_of(name)
                if place is not None:
                    places.append((name, place))
                    room -= self._bytes_of(name)
        return places

    def _place_of(self, name: bytes) -> int | None:
        if name.startswith(KV):
            return self._cache.block_of(name[1:])
        return None if self._slots is None else self._slots.holder_of(name[1:])

    def _bytes_of(self, name: bytes) -> int:
        return self._shape.block_bytes if name.startswith(KV) else self._shape.state_bytes

    # --- up ---

    def restore_for(self, request: EngineRequest, now: float) -> Restore | None:
        """A restore to hold the request for, which has begun, maybe for another request; None: it is not held."""
        if not self._stored or (request.sampling_params.prompt_logprobs is not None and not request.output_token_ids):
            return None
        token_ids = (*request.prompt_token_ids, *request.output_token_ids)
        restore = self._promised(HashChain(request.cache_salt, request.tenant), token_ids)
        if restore is None:
            return None
        for other in self._restores.values():
            if other.names[0] == restore.names[0] and not other.is_over:
                return other
        if self._moving_s(restore) >= self._computing_time_s(restore):
            return None
        self._num_restores += 1
        restore.ticket = self._num_restores
        restore.due_s = now + MOST_HELD_S
        self._restores[restore.ticket] = restore
        if self._has_room(restore):
            self._begin(restore, now)
        return restore

    def _moving_s(self, restore: Restore) -> float:
        queued = restore.num_bytes + sum(other.num_bytes for other in self._restores.values())
        return FIXED_S + queued * (self._mover.counts.read_s_per_byte + self._mover.counts.copy_s_per_byte)

    def _computing_time_s(self, restore: Restore) -> float:
        position = restore.depth * self._allocator.block_size - restore.num_tokens
        return self._computing_s(position, restore.num_tokens)

    def _has_room(self, restore: Restore) -> bool:
        """Whether the blocks fit beside what runs and the restores before it, and nothing else waits for room."""
        if not self._allocator.num_used and len(self._restores) == 1:
            return True
        others = [other for other in self._restores.values() if other.ticket < restore.ticket]
        if self._num_waiting or not all(other.is_begun for other in others):
            return False
        taken = sum(self._allocator.num_blocks_for(len(other.token_ids)) for other in others)
        return taken + self._allocator.num_blocks_for(len(restore.token_ids)) <= self._allocator.num_free

    def _begin(self, restore: Restore, now: float) -> None:
        """Reads its pieces from now on."""
        restore.is_begun = True
        restore.due_s = now + min(MOST_HELD_S, max(LEAST_S, self._computing_time_s(restore)))
        self._mover.fetch(restore.ticket, restore.names, self._shape.piece)

    def _begin_waiting(self, now: float) -> None:
        """Begins restores for which there is room now, oldest first, of what is in the store alone now."""
        for restore in self._restores.values():
            if restore.is_begun:
                continue
            if not self._has_room(restore):
                return
            promised = self._promised(restore.chain, restore.token_ids)
            if promised is None:  # what it waited for is here, or lost
                restore.has_failed = True
                continue
            restore.first, restore.names, restore.depth = promised.first, promised.names, promised.depth
            restore.num_tokens, restore.num_bytes = promised.num_tokens, promised.num_bytes
            self._begin(restore, now)

    def _promised(self, chain: HashChain, token_ids: Sequence[int]) -> Restore | None:
        """A restore of the part of a prefix that is in the store alone; None: there is none."""
        size = self._allocator.block_size
        most = (len(token_ids) - 1) // size
        num_here = len(self._cache.find(chain, token_ids, most))
        end = num_here
        while end < most and KV + chain.hash_of(end, token_ids, size) in self._stored:
            end += 1
        state: tuple[bytes, ...] = ()
        usable = num_here
        if self._slots is not None:
            usable, _ = self._slots.deepest(chain, token_ids, num_here)
            end, state = self._deepest_state(chain, token_ids, usable, end)
        if end <= usable:
            return None
        names = [KV + chain.hash_of(index, token_ids, size) for index in range(num_here, end)]
        num_bytes = len(names) * self._shape.block_bytes + len(state) * self._shape.state_bytes
        return Restore(
            ticket=0,
            chain=chain,
            token_ids=token_ids,
            first=num_here,
            names=(*names, *state),
            depth=end,
            num_tokens=(end - usable) * size,
            num_bytes=num_bytes,
            due_s=0.0,
        )

    def _deepest_state(
        self, chain: HashChain, token_ids: Sequence[int], usable: int, end: int
    ) -> tuple[int, tuple[bytes, ...]]:
        """Behind how many blocks, of more than `usable` and up to `end`, a state is; its name if it is not here."""
        assert self._slots is not None, "the model keeps states"
        for depth in range(end, usable, -1):
            block_hash = chain.hash_of(depth - 1, token_ids, self._allocator.block_size)
            if self._slots.holder_of(block_hash) is not None:
                return depth, ()
            if STATE + block_hash in self._stored:
                return depth, (STATE + block_hash,)
        return usable, ()

    def note_piece(self, ticket: int) -> None:
        """The next piece of a restore was read."""
        if (restore := self._restores.get(ticket)) is not None:
            restore.num_ready += 1

    def advance(self, step_s: float | None, now: float, num_waiting: int = 0) -> list[Restore]:
        """Puts pieces that were read in their places; returns the restores that are over, or given up. `step_s` as for
        `store_some`; `num_waiting` requests wait for memory or a slot.
        """
        self._num_waiting = num_waiting
        if not self._restores:
            return []
        self._begin_waiting(now)
        if step_s is not None:
            self._take_budget_s = min(MOST_S, self._take_budget_s + TAKE_SHARE * step_s)
        num_bytes = 0
        for restore in self._restores.values():
            while restore.num_ready and not restore.is_over:
                if step_s is not None and num_bytes * self._mover.counts.copy_s_per_byte > self._take_budget_s:
                    break
                num_bytes += self._take_piece(restore)
        if step_s is not None:
            self._take_budget_s = max(0.0, self._take_budget_s - num_bytes * self._mover.counts.copy_s_per_byte)
        over = [restore for restore in self._restores.values() if restore.is_over or now >= restore.due_s]
        for restore in over:
            self.end(restore)
        return over

    def end(self, restore: Restore) -> None:
        """Nobody waits for it any more."""
        if self._restores.pop(restore.ticket, None) is None:
            return
        if restore.is_begun and restore.num_taken < len(restore.names):
            self._mover.fetch(restore.ticket, (), 0)
        if restore.num_taken == len(restore.names):
            self._num_hit_tokens += restore.num_tokens
        elif self._slots is None:  # else the state is missing, and with it all is
            self._num_hit_tokens += restore.num_taken * self._allocator.block_size

    @property
    def has_pieces(self) -> bool:
        """Whether `advance` would put some in their places now."""
        return any(restore.num_ready and not restore.is_over for restore in self._restores.values())

    @property
    def next_due_s(self) -> float:
        """When the first restore is given up."""
        return min((restore.due_s for restore in self._restores.values()), default=float("inf"))

    def _take_piece(self, restore: Restore) -> int:
        """Puts the next piece in its places; its bytes."""
        restore.num_ready -= 1
        names = restore.names[restore.num_taken : restore.num_taken + self._shape.piece]
        of_state = names[-1] if names[-1].startswith(STATE) else None
        blocks = names[:-1] if of_state else names
        first = restore.first + restore.num_taken
        before = self._cache.find(restore.chain, restore.token_ids, first)
        has_slot = of_state is None or (self._slots is not None and self._slots.num_free > 0)
        if len(before) < first or not has_slot:
            restore.has_failed = True
            return 0
        self._allocator.share(before)
        if self._allocator.num_free < len(blocks):
            self._allocator.free(before)
            restore.has_failed = True
            return 0
        own = self._allocator.allocate(len(blocks))
        places = list(zip(blocks, own, strict=True))
        slot: int | None = None
        copies: Sequence[StateCopy] = ()
        if of_state and self._slots is not None:
            slot = self._slots.take()
            copies = self._slots.take_copies()
            places.append((of_state, slot))
        found = self._mover.take(restore.ticket, places, copies)
        self._keep(restore, first, own, slot, found)
        self._allocator.free([*before, *own])
        for (name, _), is_there in zip(places, found, strict=True):
            if not is_there:
                self._forget(name)
        return sum(self._bytes_of(name) for name in names)

    def _keep(self, restore: Restore, first: int, own: Sequence[int], slot: int | None, found: Sequence[bool]) -> None:
        """The first blocks that are there, without a gap, can be found from now on; a state if all of them are."""
        chain, token_ids = restore.chain, restore.token_ids
        num_found = next((number for number, is_there in enumerate(found) if not is_there), len(found))
        for index, block_id in enumerate(own[:num_found], first):
            self._cache.store(block_id, chain, token_ids, index)
        if slot is not None and self._slots is not None:
            if num_found == len(found):
                self._slots.put(slot, chain, token_ids, restore.depth)
            else:
                self._slots.give_back(slot)
        restore.num_taken += num_found
        restore.has_failed = num_found < len(found)

"""Restores: prefixes that come from the store below the cache, or from another replica. A core without IO.

A request whose prefix goes on there is held until its blocks are in the cache, where that is sooner than to compute
them, and then submitted as if it had come just now. It finds them as it finds any cached block: nothing but the cache
knows where they came from. Until then they have no owner, so running requests come first; but all blocks of prefixes
that were not extended, and those that were used before them, are evicted earlier. Restores that do not fit into memory
beside running requests and each other would evict each other's blocks: they wait for room, in the order of their
classes, and tenants take turns. One that has begun waits too where running requests have taken its room. Computing
would wait for the same room; but it can preempt a worse class, so beside one a request waits for room no longer than
computing would take. Once its blocks are being read it waits for them no longer than that.
"""

from collections.abc import Callable, Set
from typing import Final

from holdfast.worker.block_hash import HashChain
from holdfast.worker.cache.block_pool import BlockAllocator
from holdfast.worker.cache.state_slots import StateSlots
from holdfast.worker.engine.promises import Promises
from holdfast.worker.engine.restore import Expected, Restore
from holdfast.worker.engine.restored_pieces import RestoredPieces
from holdfast.worker.engine.tier_mover import KV, STATE, Mover, TierShape, receive_s_per_byte
from holdfast.worker.request import BlockSource, EngineRequest, PinnedPrefix, Priority

SHARE: Final = 0.1
"""Share of the steps' time that copying blocks from the store may cost them, except for one piece each time."""
MAX_BUDGET_S: Final = 0.01
"""Most seconds of it that are saved up: running requests wait for so long at a time."""
FIXED_S: Final = 0.002
"""Seconds of a restore besides reading: two threads wait for each other."""
ASKING_S: Final = 0.01
"""The same for a restore from another replica."""
MIN_RESTORE_S: Final = 0.1
"""A request is held for so long at most, if computing would take less."""
MAX_AHEAD_S: Final = 60.0
"""Time limit of fetching blocks that another replica is still computing, while no request waits for them."""
MAX_SENDERS: Final = 64  # replicas whose tokens are counted
MAX_HELD_S: Final = 30.0
"""And for so long, however long computing would take."""


class Restores:
    """Restores of the leader's engine. Used by one thread."""

    def __init__(
        self,
        allocator: BlockAllocator,
        slots: StateSlots | None,
        mover: Mover,
        shape: TierShape,
        stored: Set[bytes],
        lose: Callable[[bytes], None],
        computing_s: Callable[[int, int], float],
        num_awaited_blocks: Callable[[Priority], int],
        can_preempt: Callable[[Priority], bool],
        moves: set[int],
    ) -> None:
        """`stored` are the names in the store; `lose` is called with a name that the store turns out not to have.

        `computing_s`: seconds to compute this many tokens of a prompt, from a position on; infinite before any
        measurement. `num_awaited_blocks`: most blocks that requests of a class or a better one take which wait for
        memory or a slot; 0: none does.
        `can_preempt`: whether a request of a class could preempt a running one. `moves` has a ticket while its restore
        is open.
        """
        self._allocator = allocator
        self._slots = slots
        self._mover = mover
        self._shape = shape
        self._stored = stored
        self._pieces = RestoredPieces(allocator, slots, mover, shape, lose)
        self._promises = Promises(allocator, slots, shape, stored)
        self._computing_s = computing_s
        self._num_awaited_blocks = num_awaited_blocks
        self._can_preempt = can_preempt
        self._moves = moves
        self._restores: dict[int, Restore] = {}
        self._num_restores = self.num_hit_tokens = self.num_received_tokens = 0
        self.received_from: dict[str, int] = {}
        """Tokens that came from other replicas, by the addresses of their links; the last senders."""
        self.num_cut_transfers = 0
        """Transfers that were asked for and did not bring all."""
        self._budget_s = 0.0

    def restore_for(self, request: EngineRequest, now: float) -> Restore | None:
        """A restore to hold the request for, which has begun, maybe for another request; None: it is not held."""
        source = request.block_source if self._mover.can_ask else None
        if not self._stored and source is None:
            return None
        if request.sampling_params.prompt_logprobs is not None and not request.output_token_ids:
            return None
        token_ids = (*request.prompt_token_ids, *request.output_token_ids)
        chain = HashChain(request.cache_salt, request.tenant, request.adapter_digest)
        restore = self._promises.find(chain, token_ids, request.priority, source)
        if restore is None:
            return None
        restore.tenant = request.tenant
        for other in self._restores.values():
            if not other.is_over and not other.is_handed_on and restore.names[0] in other.names[other.num_taken :]:
                self._join(other, restore, now)
                return other
        if self._moving_s(restore) >= self._computing_time_s(restore):
            return None
        return self._waiting(restore, now)

    def bring(self, prefix: PinnedPrefix, source: str, now: float) -> Restore | None:
        """Restores a prefix that the replica at this address has pinned, as far as it is not here; None: all of it is.
        It waits for room after all waiting requests.
        """
        num_tokens = (len(prefix.hashes) - 1) * self._allocator.block_size
        chain, there = HashChain.known(prefix.hashes), BlockSource(source, num_tokens)
        restore = self._promises.find(chain, range(num_tokens + 1), Priority.LOW, there)
        if restore is None or not self._mover.can_ask:
            return None
        restore.tenant, restore.is_handed_on = prefix.tenant, True
        return self._waiting(restore, now)

    def _waiting(self, restore: Restore, now: float) -> Restore:
        """Opens a restore, which begins at once where it has room."""
        restore.due_s = now + MAX_HELD_S
        self._hold(restore, now)
        self._open(restore)
        if self._has_room(restore):
            self._begin(restore, now)
        return restore

    def fetch_ahead(self, request: EngineRequest, now: float) -> Restore | int:
        """Fetches a prefix for a request that comes later, from the replica that computes it now. No request waits for
        it until then; without room now, or if computing is faster, it is dropped: the number of cached tokens.
        """
        source, token_ids = request.block_source, (*request.prompt_token_ids, *request.output_token_ids)
        if source is None or not self._mover.can_ask or self._slots is not None:
            return 0
        chain = HashChain(request.cache_salt, request.tenant, request.adapter_digest)
        num_here = self._promises.num_here(chain, token_ids) * self._allocator.block_size
        restore = self._promises.find(chain, token_ids, request.priority, source)
        if restore is None or restore.source is None or any(one.names[0] in restore.names for one in self._ongoing()):
            return num_here
        restore.is_ahead = True
        if self._moving_s(restore) >= self._computing_time_s(restore) or not self._has_room(restore):
            return num_here
        restore.tenant, restore.is_begun = request.tenant, True
        restore.computed_s = now + MAX_AHEAD_S
        self._open(restore)
        self._mover.ask(restore.ticket, source, restore.asked, self._shape.piece, MAX_AHEAD_S)
        return restore

    def is_open(self, restore: Restore) -> bool:
        """Whether its blocks may still come."""
        return restore.ticket in self._restores

    def _ongoing(self) -> list[Restore]:
        return [restore for restore in self._restores.values() if not restore.is_over]

    def _open(self, restore: Restore) -> None:
        self._num_restores += 1
        restore.ticket = self._num_restores
        restore.turn = sum(other.tenant == restore.tenant for other in self._restores.values())
        self._restores[restore.ticket] = restore
        self._moves.add(restore.ticket)

    def _join(self, other: Restore, restore: Restore, now: float) -> None:
        """Waits for blocks that come already, no longer than computing takes from now on."""
        other.priority = min(other.priority, restore.priority)
        if other.source is not None and other.source.is_computing:
            self._hold(restore, now)
            other.computed_s = min(other.computed_s, restore.computed_s)

    def _hold(self, restore: Restore, now: float) -> None:
        """Notes when computing could have ended that begins now."""
        takes_s = MAX_HELD_S if restore.is_handed_on else max(MIN_RESTORE_S, self._computing_time_s(restore))
        restore.computed_s = now + min(MAX_HELD_S, takes_s)

    def _moving_s(self, restore: Restore) -> float:
        """Seconds until it is here. Blocks of one place come one after the other. Of a request that runs on meanwhile
        only what its own blocks take counts.
        """
        counts, source = self._mover.counts, restore.source
        if source is not None and source.is_leaving:
            return restore.num_bytes * (counts.copy_s_per_byte + receive_s_per_byte(counts, source.address))
        others = sum(one.num_bytes for one in self._restores.values() if (one.source is None) is (source is None))
        moving_s = counts.read_s_per_byte if source is None else receive_s_per_byte(counts, source.address)
        fixed_s = FIXED_S if source is None else ASKING_S
        return fixed_s + (restore.num_bytes + others) * (counts.copy_s_per_byte + moving_s)

    def _computing_time_s(self, restore: Restore) -> float:
        position = restore.depth * self._allocator.block_size - restore.num_tokens
        return self._computing_s(position, restore.num_tokens)

    def _has_room(self, restore: Restore) -> bool:
        """Whether the blocks fit beside running requests and restores that have begun, and no request or restore of its
        class or a better one waits for room before it. What is fetched ahead has to fit beside waiting requests: those
        may have come just now.
        """
        others = [other for other in self._restores.values() if other is not restore]
        if not self._allocator.num_used and not others:
            return True
        num_awaited = self._num_awaited_blocks(Priority.LOW if restore.is_ahead else restore.priority)
        if num_awaited and not restore.is_ahead:
            return False
        begun = [other for other in others if other.is_begun]
        if any(other.order < restore.order for other in others if not other.is_begun):
            return False
        of_state = 0 if self._slots is None else self._slots.blocks_per_slot
        needed = (self._allocator.num_blocks_for(len(one.token_ids)) + of_state for one in (*begun, restore))
        return sum(needed) + num_awaited <= self._allocator.num_free

    def _is_due(self, restore: Restore, now: float) -> bool:
        """Whether it is given up, and the missing blocks are computed."""
        if restore.is_begun or (self._can_preempt(restore.priority) and not restore.is_handed_on):
            return now >= restore.computed_s
        return now >= restore.due_s

    def _begin(self, restore: Restore, now: float) -> None:
        """Reads its pieces from now on."""
        restore.is_begun = True
        self._pieces.note_use(restore)
        self._hold(restore, now)
        if restore.source is None:
            self._mover.fetch(restore.ticket, restore.names, self._shape.piece)
        else:
            lasts_s = restore.computed_s - now
            self._mover.ask(restore.ticket, restore.source, restore.asked, self._shape.piece, lasts_s)

    def _begin_waiting(self, now: float) -> None:
        """Begins restores that fit now, of blocks that only the store has."""
        for restore in sorted((one for one in self._restores.values() if not one.is_begun), key=lambda one: one.order):
            if not self._has_room(restore):
                return
            promised = self._promises.find(restore.chain, restore.token_ids, restore.priority, restore.source)
            if promised is None:  # its blocks are here, or lost
                restore.has_failed = True
                continue
            restore.first, restore.names, restore.depth = promised.first, promised.names, promised.depth
            restore.asked = promised.asked
            restore.num_tokens, restore.num_bytes = promised.num_tokens, promised.num_bytes
            restore.source = promised.source
            self._begin(restore, now)

    def note_piece(self, ticket: int) -> None:
        """The next piece of a restore was read."""
        if (restore := self._restores.get(ticket)) is not None:
            restore.num_ready += 1

    def settle(self, ticket: int, num_blocks: int) -> Expected | None:
        """Another replica sends this number of the requested blocks. Returns what to expect, including a snapshot after
        them; None: no request waits for them, or they are of no use.
        """
        restore = self._restores.get(ticket)
        if restore is None or restore.source is None:
            return None
        size = self._allocator.block_size
        there = restore.source.block_size or size
        num_skipped = restore.first * size % there
        depth = restore.first + max(0, num_blocks * there - num_skipped) // size
        blocks = [name for name in restore.names if name.startswith(KV)][: depth - restore.first]
        depth = restore.first + len(blocks)
        lost = (restore.depth - depth) * size
        if not blocks or lost >= restore.num_tokens:
            restore.has_failed = True
            return None
        restore.depth, restore.num_tokens = depth, restore.num_tokens - lost
        restore.names = blocks if self._slots is None else [*blocks, STATE + blocks[-1][len(KV) :]]
        num_sent = -(-(num_skipped + len(blocks) * size) // there)
        sent = restore.asked[:num_sent] if self._slots is None else restore.names
        return Expected(restore.names, sent, num_skipped)

    def cut(self, ticket: int) -> None:
        """No further piece of a restore comes."""
        if (restore := self._restores.get(ticket)) is not None:
            restore.is_cut = True

    def advance(self, step_s: float | None, now: float) -> list[Restore]:
        """Puts pieces that were read in their places; returns the restores that are over, or given up. `step_s`: how
        long the last step took; None: nothing runs.
        """
        if not self._restores:
            return []
        self._begin_waiting(now)
        if step_s is not None:
            self._budget_s = min(max(MAX_BUDGET_S, SHARE * step_s), self._budget_s + SHARE * step_s)
        num_bytes = 0
        for restore in self._restores.values():
            while restore.num_ready and not restore.is_over:
                if step_s is not None and num_bytes * self._mover.counts.copy_s_per_byte > self._budget_s:
                    break
                if not self._pieces.has_room(restore):
                    self._wait_for_room(restore, now)
                    break
                num_bytes += self._pieces.take_next(restore)
        if step_s is not None:
            self._budget_s = max(0.0, self._budget_s - num_bytes * self._mover.counts.copy_s_per_byte)
        over = [restore for restore in self._restores.values() if restore.is_over or self._is_due(restore, now)]
        for restore in over:
            self.end(restore)
        return over

    def end(self, restore: Restore) -> None:
        """No request waits for it any longer."""
        if self._restores.pop(restore.ticket, None) is None:
            return
        self._moves.discard(restore.ticket)
        if restore.is_begun and restore.num_taken < len(restore.names):
            self._mover.fetch(restore.ticket, (), 0)
        num_tokens = 0
        if restore.num_taken == len(restore.names):
            num_tokens = restore.num_tokens
        elif self._slots is None:  # else the state is missing, and with it all is
            num_tokens = restore.num_taken * self._allocator.block_size
        if restore.source is None:
            restore.num_hit_tokens = num_tokens
            self.num_hit_tokens += num_tokens
        else:
            self._note_received(restore, restore.source.address, num_tokens)

    def _note_received(self, restore: Restore, address: str, num_tokens: int) -> None:
        self.num_received_tokens += num_tokens
        self.num_cut_transfers += restore.is_begun and restore.num_taken < len(restore.names)
        if num_tokens:
            self.received_from[address] = self.received_from.pop(address, 0) + num_tokens
            if len(self.received_from) > MAX_SENDERS:
                del self.received_from[next(iter(self.received_from))]

    def give_up(self) -> None:
        """Ends all: the store belongs to other weights now."""
        for restore in self._restores.values():
            restore.has_failed = True

    @property
    def next_due_s(self) -> float:
        """When the first restore is given up."""
        return min((restore.next_look_s for restore in self._restores.values()), default=float("inf"))

    def _wait_for_room(self, restore: Restore, now: float) -> None:
        """Running requests have taken the room of a restore that has begun. Computing, which would wait for it as well,
        could begin no earlier than now. What is fetched ahead is dropped.
        """
        if restore.is_ahead:
            restore.has_failed = True
        elif now < restore.due_s and not self._can_preempt(restore.priority):
            self._hold(restore, now)

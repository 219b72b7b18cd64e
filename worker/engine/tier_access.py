"""Access of a replica to the block tier of its engine: what its link and its mover ask and report."""

from collections.abc import Callable, Iterable

from holdfast.worker.engine.block_tier import BlockTier
from holdfast.worker.engine.engine_core import EngineCore
from holdfast.worker.engine.inbox import Inbox
from holdfast.worker.engine.restore import Expected
from holdfast.worker.engine.sendings import Sendings
from holdfast.worker.engine.tier_mover import MoverEvents
from holdfast.worker.request import PinnedPrefix


class TierAccess:
    """The tier of an engine, which may have none: then no blocks are sent or received."""

    def __init__(self, core: EngineCore, inbox: Inbox, clock: Callable[[], float]) -> None:
        self._core = core
        self._inbox = inbox
        self._clock = clock

    def put_below(self, tier: BlockTier) -> MoverEvents:
        """Gives the cache a store below it, before the start; what its mover is to call."""
        self._core.put_below(tier)
        put = self._inbox.put_unless_closed
        return MoverEvents(
            on_news=lambda came, gone: put(lambda: tier.learn(came, gone)),
            on_piece=lambda ticket: put(lambda: tier.restores.note_piece(ticket)),
            on_written=lambda: put(lambda: None),
            on_failed=lambda ticket: put(lambda: tier.restores.cut(ticket)),
        )

    @property
    def sendings(self) -> Sendings:
        """Blocks that go to other replicas. On the engine's thread only, where there is a tier."""
        assert self._core.tier is not None, "blocks can be moved"
        return self._core.tier.sendings

    @property
    def sends_blocks(self) -> bool:
        """Whether blocks are being sent to other replicas."""
        return self._core.tier is not None and self._core.tier.sendings.is_busy

    def pinned_prefixes(self) -> list[PinnedPrefix]:
        """Prefixes that are pinned. On the engine's thread only."""
        return self._core.scheduler.pinning.held(self._clock())

    def unpin(self, tenant: str, last_hash: bytes) -> int:
        """Ends the tenant's pin of the prefix that ends with this block; an empty hash: all of its pins. The number of
        blocks that were pinned. On the engine's thread only.
        """
        pinning = self._core.scheduler.pinning
        return pinning.unpin(tenant, last_hash) if last_hash else pinning.unpin_all(tenant)

    def take_pins(self, prefixes: Iterable[PinnedPrefix], source: str) -> None:
        """Pins the pinned prefixes of the replica at this address, once their blocks are here. On the engine's thread
        only.
        """
        if self._core.tier is not None:
            self._core.tier.takeover.take(prefixes, source, self._clock())

    def settle_restore(self, ticket: int, num_blocks: int) -> Expected | None:
        """Blocks that another replica sends for a restore; None: no request waits for it. On the engine's thread."""
        return None if self._core.tier is None else self._core.tier.restores.settle(ticket, num_blocks)

    def cut_restore(self, ticket: int) -> None:
        """No further piece of a restore comes."""
        tier = self._core.tier
        if tier is not None:
            self._inbox.put_unless_closed(lambda: tier.restores.cut(ticket))

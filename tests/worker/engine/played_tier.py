"""A core with a tier below its cache whose store the test plays."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from holdfast.worker.cache.block_pool import BlockAllocator
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.engine.block_tier import BlockTier
from holdfast.worker.engine.engine_core import EngineCore
from holdfast.worker.engine.tier_mover import KV, Place, TierShape
from holdfast.worker.request import BlockSource, EngineRequest
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_plan import StateCopy
from holdfast.worker.step_update import EngineStats, StepUpdate
from tests.pseudo_model import PseudoRunner

SIZE = 4
BLOCK_BYTES = 1000
PROMPT = tuple(range(1, 34))
"""Eight blocks, and a token that is always computed."""


class Counts:
    copy_s_per_byte = write_s_per_byte = read_s_per_byte = 1e-6
    send_s_per_byte = 0.0
    received_bytes_per_s: Mapping[str, float] = MappingProxyType({"": 1e6})
    num_blocks = num_bytes = num_failures = num_errors = staged_bytes = num_received_bytes = num_sent_bytes = 0


class PlayedMover:
    """Notes what is asked of it. `missing`: names that are not there when they are taken."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.has_room = True
        self.stored: list[bytes] = []
        self.kept: dict[str, tuple[list[bytes], float]] = {}
        self.fetched: dict[int, Sequence[bytes]] = {}
        self.missing: set[bytes] = set()
        self.can_ask = True
        self.asked: dict[int, Sequence[bytes]] = {}
        self.sent: dict[int, list[bytes]] = {}
        self.ended: set[int] = set()
        self.sending_room: bool | None = True
        self.num_taken = 0

    def store(self, places: Sequence[Place]) -> None:
        self.stored += [name for name, _ in places]

    def keep(self, names: Sequence[bytes], tenant: str, ttl_s: float) -> None:
        self.kept[tenant] = (list(names), ttl_s)

    def fetch(self, ticket: int, names: Sequence[bytes], piece: int) -> None:
        self.fetched[ticket] = names

    def ask(self, ticket: int, source: BlockSource, names: Sequence[bytes], piece: int, lasts_s: float) -> None:
        self.asked[ticket] = names

    def send(self, number: int, places: Sequence[Place]) -> None:
        self.sent.setdefault(number, []).extend(name for name, _ in places)
        if not places:
            self.ended.add(number)

    def sends_room(self, number: int) -> bool | None:
        return self.sending_room

    def take(self, ticket: int, places: Sequence[Place], state_copies: Sequence[StateCopy]) -> Sequence[bool]:
        self.num_taken += len(places)
        return [name not in self.missing for name, _ in places]


class Listener:
    def __init__(self) -> None:
        self.deltas: list = []
        self.updates: list[StepUpdate] = []

    def on_update(self, update: StepUpdate) -> None:
        self.deltas += update.deltas
        self.updates.append(update)

    def ask_in_doubt(self) -> bool:
        return False


class Played:
    """A core with a tier. Computing takes `computing_s`."""

    def __init__(self, num_blocks: int = 64, computing_s: float = 1.0, **settings) -> None:
        scheduler = Scheduler(
            SchedulerConfig(**settings),
            num_blocks=num_blocks,
            block_size=SIZE,
            max_model_len=200,
            eos_token_ids=frozenset(),
        )
        self.core = EngineCore(scheduler)
        self.mover = PlayedMover()
        self.computing_s = computing_s
        shape = TierShape(block_bytes=BLOCK_BYTES)
        self.tier = BlockTier(
            *scheduler.caches,
            self.mover,
            shape,
            lambda *_: self.computing_s,
            scheduler.num_awaited_blocks,
            scheduler.can_preempt,
            scheduler.pinning,
        )
        self.core.put_below(self.tier)
        self.listener = Listener()
        self.core.attach(self.listener)
        self._runner = PseudoRunner(num_blocks, SIZE)

    def submit(self, name: str, prompt: Sequence[int] = PROMPT, now: float = 0.0, **fields) -> None:
        params = SamplingParams(max_tokens=2, seed=1)
        request = EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling_params=params, **fields)
        self.core.submit(request, self.listener, now)

    def run(self, step_s: float = 0.01) -> None:
        """All that is not held."""
        while (plan := self.core.scheduler.plan()) is not None:
            self.core.commit(plan, self._runner.run(plan), step_s)
            self._tell()
            self.core.tend_tier(0.0, step_s)

    def idle(self, now: float = 0.0) -> None:
        self.core.tend_tier(now)
        self._tell()

    def _tell(self) -> None:
        for listener, update in self.core.take_updates():
            listener.on_update(update)

    @property
    def stats(self) -> EngineStats:
        return self.core.scheduler.stats()

    def names(self, prompt: Sequence[int] = PROMPT, **fields) -> list[bytes]:
        """The names of a prompt's blocks."""
        other = Played()
        other.submit("any", prompt, **fields)
        other.run()
        other.idle()
        return [name for name in other.mover.stored if name.startswith(KV)][: (len(prompt) - 1) // SIZE]


def finished(played: Played) -> set[str]:
    return {delta.attempt for delta in played.listener.deltas if delta.finish_reason is not None}


def bring(played: Played, ticket: int = 1) -> None:
    played.tier.restores.note_piece(ticket)
    played.idle()


class _AsAllOthers:
    """An allocator for which blocks that come back are as those of prefixes that nobody extended."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._allocator, name)

    def free(self, block_ids: Sequence[int], *, is_extended: bool) -> None:
        self._allocator.free(block_ids)


def bring_back_as_all_others(tier: BlockTier) -> None:
    """Plants a mistake: restored blocks are evicted as early as any."""
    pieces = tier.restores._pieces
    pieces._allocator = _AsAllOthers(pieces._allocator)

"""Simulated disk of a host: the block stores of its replicas, in virtual time, and its folder of routers' journals.

A block holds the values that the pseudo-model has written to it, and beside them its tenant, salt and release: those of
the request that computed it. Who reads keys and values of another breaks a promise, whatever comes of it.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable
from zlib import crc32

from holdfast.cluster.simulate.kernel.timeline import Violation
from holdfast.router.requests.reading_journal import SIZE
from holdfast.worker.engine.tier_mover import KV
from holdfast.worker.request import PinnedPrefix
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.step_plan import StateCopy, StepPlan

Owner = tuple[str, str, str]
"""Release, tenant and salt."""
NOBODY: Final[Owner] = ("", "", "nobody")


class Row(NamedTuple):
    """Content of a block or a slot, and its owner."""

    content: Any
    owner: Owner

    @property
    def digest(self) -> int:
        return crc32(repr(self).encode())


class SimulatedDisk:
    """All that the replicas of a host have stored, within a bound: the least recently used rows go first, and kept ones
    last.
    """

    def __init__(self, rng: random.Random, now: Callable[[], float], max_rows: int) -> None:
        self._rng = rng
        self._now = now
        self._max_rows = max_rows
        self._rows: OrderedDict[tuple[str, bytes], tuple[Row, int]] = OrderedDict()  # by kind and name, with the digest
        self._kept: dict[tuple[str, bytes], tuple[str, float]] = {}  # tenant and expiry time
        self.slowness = 1.0
        self.num_read = 0
        self.movers: list[Any] = []
        """Movers of replicas that are up."""

    def names(self, kind: str) -> list[bytes]:
        return [name for found, name in self._rows if found == kind]

    def put(self, kind: str, name: bytes, row: Row) -> list[tuple[str, bytes]]:
        """Stores a row; the kinds and names that were evicted."""
        self._rows.setdefault((kind, name), (row, row.digest))
        evicted = []
        while len(self._rows) > self._max_rows:
            first = next((key for key in self._rows if self._kept.get(key, ("", 0.0))[1] <= self._now()), None)
            evicted.append(first or next(iter(self._rows)))
            del self._rows[evicted[-1]]
        return evicted

    def keep(self, kind: str, names: Sequence[bytes], tenant: str, ttl_s: float) -> None:
        """Does as `BlockStore.keep`, without shares; below 0 as with 0."""
        if ttl_s > 0:
            self._kept |= {(kind, name): (tenant, self._now() + ttl_s) for name in names}
        else:
            wanted = {(kind, name) for name in names}
            self._kept = {
                key: kept
                for key, kept in self._kept.items()
                if kept[0] != tenant or key[0] != kind or (wanted and key not in wanted)
            }

    def get(self, kind: str, name: bytes) -> Row | None:
        """None if it is missing or damaged."""
        found = self._rows.get((kind, name))
        if found is None:
            return None
        self.num_read += 1
        self._rows.move_to_end((kind, name))
        if not is_whole(*found):
            del self._rows[kind, name]
            return None
        return found[0]

    def lose(self) -> None:
        """Loses everything, and reports nothing."""
        self._rows.clear()

    def damage(self, share: float) -> None:
        """Changes what some rows of keys and values hold."""
        for key, (row, digest) in list(self._rows.items()):
            if key[1].startswith(KV) and self._rng.random() < share:
                changed = bytes(one ^ 1 for one in row.content)
                self._rows[key] = (row._replace(content=changed), digest)


def is_whole(row: Row, digest: int) -> bool:
    """Whether a row is unchanged since `put`."""
    return row.digest == digest


@runtime_checkable
class MovableRunner(Protocol):
    """A runner whose blocks can be copied elsewhere and back."""

    def read_block(self, kind: bytes, place: int) -> Any:
        """Content of the block at `place`."""
        ...

    def write_block(self, kind: bytes, place: int, content: Any) -> None:
        """Replaces the content of the block at `place`."""
        ...

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Copies states between slots."""
        ...


class Owners:
    """Owner of each block of a replica."""

    def __init__(self, release: str, scheduler: Scheduler, block_size: int) -> None:
        self._release = release
        self._scheduler = scheduler
        self._block_size = block_size
        self._owners: dict[int, Owner] = {}

    def __getitem__(self, block_id: int) -> Owner:
        return self._owners.get(block_id, NOBODY)

    def __setitem__(self, block_id: int, owner: Owner) -> None:
        self._owners[block_id] = owner

    def check(self, plan: StepPlan) -> None:
        """Raises `Violation` for a sequence of the plan that reads another one's blocks; notes which ones it writes."""
        requests = self._scheduler.running_requests()
        for copy in plan.block_copies:
            self._owners[copy.destination] = self[copy.source]
        for sequence in plan.sequences:
            request = requests.get(sequence.sequence_id)
            if request is None:
                continue
            owner = (self._release, request.tenant, request.cache_salt)
            num_read = sequence.first_position // self._block_size
            for block_id in sequence.block_ids[:num_read]:
                if self[block_id] != owner:
                    raise Violation(f"a request of {owner} reads a block of {self[block_id]}")
            self._owners.update(dict.fromkeys(sequence.block_ids[num_read:], owner))

    def pinned(self, now: float) -> list[PinnedPrefix]:
        """Prefixes that are pinned."""
        return self._scheduler.pinning.held(now)

    def check_pins(self) -> None:
        """Raises `Violation` for a block that is pinned for another tenant than the one whose request computed it."""
        allocator, _ = self._scheduler.caches
        for block_id, pin in allocator.pins.by_block.items():
            is_noted = (
                block_id in allocator.prefix_cache.contents and block_id in self._owners
            )  # blocks of windows are not
            if is_noted and self[block_id][1] != pin.tenant:
                raise Violation(f"block {block_id} of {self[block_id]} is pinned for the tenant {pin.tenant!r}")


@dataclass(slots=True)
class MovingFigures:
    """Same as in `worker/engine/tier_mover.py`."""

    copy_s_per_byte: float = 1e-6
    write_s_per_byte: float = 1e-6
    send_s_per_byte: float = 0.0
    read_s_per_byte: float = 1e-6
    received_bytes_per_s: Mapping[str, float] = field(default_factory=lambda: {"": 1e6})
    num_blocks: int = 0
    num_bytes: int = 0
    num_failures: int = 0
    num_errors: int = 0
    staged_bytes: int = 0
    num_received_bytes: int = 0
    num_sent_bytes: int = 0


class JournalFolder:
    """Folder of one machine, on which all routers of a simulation run."""

    def __init__(self) -> None:
        self._buffers: dict[str, bytearray] = {}
        self._ended: list[str] = []
        self._watchers: dict[str, Callable[[str, bytearray], None]] = {}

    def begin(self, router: str, watcher: Callable[[str, bytearray], None]) -> bytearray:
        """The journal of a router that starts. Its `watcher` is called with each other router that ends."""
        self._watchers[router] = watcher
        self._buffers[router] = bytearray(SIZE)
        return self._buffers[router]

    def end(self, router: str) -> None:
        """A router has ended, in whichever way."""
        del self._watchers[router]
        self._ended.append(router)
        for watcher in list(self._watchers.values()):
            watcher(router, self._buffers[router])

    def others(self, router: str) -> Iterator[tuple[str, bytearray]]:
        """The journals of all other routers, ended ones included."""
        return ((name, buffer) for name, buffer in self._buffers.items() if name != router)

    @property
    def left(self) -> list[tuple[str, bytearray]]:
        """The journals of routers that have ended."""
        return [(router, self._buffers[router]) for router in self._ended]

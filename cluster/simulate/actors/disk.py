"""Simulated disk of a host: the block stores of its replicas, in virtual time, and its folder of routers' journals.

A block holds the values that the pseudo-model has written to it, and beside them its tenant, salt and release: those of
the request that computed it. Who reads keys and values of another breaks a promise, whatever comes of it.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable
from zlib import crc32

from holdfast.cluster.simulate.kernel.timeline import Violation
from holdfast.router.requests.reading_journal import SIZE
from holdfast.worker.engine.tier_mover import KV
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
    """All that the replicas of a host have stored."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rows: dict[tuple[str, bytes], tuple[Row, int]] = {}  # by kind and name, with the digest
        self.slowness = 1.0
        self.num_read = 0
        self.movers: list[Any] = []
        """Movers of replicas that are up."""

    def names(self, kind: str) -> list[bytes]:
        return [name for found, name in self._rows if found == kind]

    def put(self, kind: str, name: bytes, row: Row) -> None:
        self._rows.setdefault((kind, name), (row, row.digest))

    def get(self, kind: str, name: bytes) -> Row | None:
        """None if it is missing or damaged."""
        found = self._rows.get((kind, name))
        if found is None:
            return None
        self.num_read += 1
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

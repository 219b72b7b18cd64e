"""Interface between a block tier and its mover, which carries out its decisions on all ranks: the names of blocks in
both, the mover's reports, counts and measurements.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from holdfast.worker.cache.sealing import Sealer
from holdfast.worker.request import BlockSource, StoredPin
from holdfast.worker.step_plan import StateCopy

KV: Final = b"k"
STATE: Final = b"s"
"""A block's name begins with its kind (keys and values, or a state). The rest is its hash."""

NAME_BYTES: Final = 17

PREFIX_ENDS: Final = -1.0
"""In place of seconds: the prefixes that end with the given blocks are kept no longer."""

PIECE_BYTES: Final = 8 << 20


class Store(Protocol):
    """Blocks below the caches of one rank, by name: on a disk, or in the host's memory. Used by one thread at a time.
    Errors of the disk are raised as OSError.
    """

    sealer: Sealer
    num_failures: int

    @property
    def num_blocks(self) -> int:
        """Blocks in it."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        ...

    def put(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """Stores blocks by name, except the ones that are there. Returns the number stored."""
        ...

    def get(self, name: bytes) -> memoryview | None:
        """Content of a block; None if it is missing, or if its digest is wrong."""
        ...

    def keep(self, names: Sequence[bytes], tenant: str, ttl_s: float) -> None:
        """Keeps these blocks for this number of seconds, within the tenant's share. 0: no longer; without names, none
        of the tenant's. `PREFIX_ENDS`: the prefixes that end with these blocks are kept no longer.
        """
        ...

    def kept_prefixes(self, kind: bytes) -> list[StoredPin]:
        """Prefixes of blocks of this kind that are kept, as far as they are stored; none where they do not outlive the
        process.
        """
        ...

    def news(self) -> tuple[list[bytes], list[bytes]]:
        """Names added since the last call, and names removed."""
        ...

    def close(self) -> None:
        """Ends its use."""
        ...


Place = tuple[bytes, int]
"""A name, and its block or slot."""


class MovingCounts(Protocol):
    """Measured cost of moving, and content of the store; on the leading rank."""

    copy_s_per_byte: float
    write_s_per_byte: float
    send_s_per_byte: float
    read_s_per_byte: float
    received_bytes_per_s: Mapping[str, float]
    num_blocks: int
    num_bytes: int
    num_failures: int
    num_errors: int
    staged_bytes: int
    num_received_bytes: int
    num_sent_bytes: int


def receive_s_per_byte(counts: MovingCounts, address: str) -> float:
    """Seconds a byte from the replica whose link has this address: as from its host, else as from all."""
    speeds = counts.received_bytes_per_s
    return 1 / (speeds.get(address.rpartition(":")[0]) or speeds[""])


class Mover(Protocol):
    """Carries out the tier's decisions, on all ranks."""

    @property
    def counts(self) -> MovingCounts:
        """Blocks and bytes moved so far."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether more may be stored now."""
        ...

    def store(self, places: Sequence[Place]) -> None:
        """Copies the content of these blocks and slots, to be written by their names."""
        ...

    def keep(self, names: Sequence[bytes], tenant: str, ttl_s: float) -> None:
        """Keeps the blocks with these names in the store for this number of seconds, or ends that, as `Store.keep`."""
        ...

    def fetch(self, ticket: int, names: Sequence[bytes], piece: int) -> None:
        """Begins to read, `piece` blocks at a time; each piece is reported. Without names: cancels the ticket."""
        ...

    @property
    def can_ask(self) -> bool:
        """Whether blocks can be requested from other replicas."""
        ...

    def ask(self, ticket: int, source: BlockSource, names: Sequence[bytes], piece: int, lasts_s: float) -> None:
        """Like `fetch`, from another replica, within this number of seconds."""
        ...

    def send(self, number: int, places: Sequence[Place]) -> None:
        """Copies the content of these blocks and slots, to be sent to another replica in this order. None: nothing
        more.
        """
        ...

    def sends_room(self, number: int) -> bool | None:
        """Whether more may be sent; None: the other replica wants nothing more."""
        ...

    def take(self, ticket: int, places: Sequence[Place], state_copies: Sequence[StateCopy]) -> Sequence[bool]:
        """Makes the copies of slots that are due, and puts the ticket's next piece in its places: for each of these,
        whether all ranks have it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TierShape:
    """Sizes on the leading rank."""

    block_bytes: int
    state_bytes: int = 0
    num_threads: int = 1
    """Threads of steps: one thread more takes that much less from them."""

    @property
    def piece(self) -> int:
        """Blocks that are read, and put in their places, at a time."""
        return max(1, PIECE_BYTES // max(1, self.block_bytes))

    def bytes_of(self, name: bytes) -> int:
        """Bytes of the block or state of this name."""
        return self.block_bytes if name.startswith(KV) else self.state_bytes


MIN_MEASURED_BYTES: Final = 1 << 16
"""Shorter transfers tell nothing of the speed: they take as long as their beginning."""
MAX_HOSTS: Final = 64
"""Hosts whose speed is remembered."""
_WEIGHT: Final = 0.2  # of the newest transfer in the moving average


class MoverEvents(NamedTuple):
    """Events for a leader, on the mover's thread."""

    on_news: Callable[[list[bytes], list[bytes]], None]
    """Names that the store gained, and lost."""
    on_piece: Callable[[int], None]
    """The next piece of a ticket is there."""
    on_written: Callable[[], None]
    """There is room for more."""
    on_failed: Callable[[int], None]
    """A ticket gets no further piece: another replica does not send it."""


class MoverCounts:
    """Counts of a mover. Written by its thread, read by any."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self.num_bytes = 0
        self.num_failures = 0
        """Blocks with a wrong digest."""
        self.num_errors = 0
        """Writes and reads that failed."""
        self.staged_bytes = 0
        self.read_s_per_byte = 1e-9
        """Seconds per byte of the disk, digests and copies; measured."""
        self.copy_s_per_byte = 5e-10
        """CPU time of the thread of the steps; measured."""
        self.write_s_per_byte = 1e-9
        """CPU time of the mover's thread; measured."""
        self.send_s_per_byte = 2e-10
        """CPU time of the connections' threads, for blocks that go to other replicas; measured."""
        self._sending_s = 0.0
        self.received_bytes_per_s: Mapping[str, float] = {"": 1e9}
        """Speed of transfers by the other replica's host, and of all by the name ""; measured."""
        self.num_received_bytes = 0
        self.num_sent_bytes = 0

    def note(self, name: str, began_s: float, ended_s: float, num_bytes: int) -> None:
        """Takes a measured time into the mean of this name, in seconds per byte."""
        if num_bytes:
            old = getattr(self, name)
            setattr(self, name, old + _WEIGHT * ((ended_s - began_s) / num_bytes - old))

    def note_sent(self, num_bytes: int, sending_s: float) -> None:
        """Takes in how many bytes were sent until now, and their CPU time."""
        if num_bytes > self.num_sent_bytes:  # else the time counts with the next bytes
            self.note("send_s_per_byte", self._sending_s, sending_s, num_bytes - self.num_sent_bytes)
            self.num_sent_bytes, self._sending_s = num_bytes, sending_s

    def note_speed(self, host: str, lasted_s: float, num_bytes: int) -> None:
        """Takes a transfer from a host into the speeds."""
        if num_bytes < MIN_MEASURED_BYTES:
            return
        old = self.received_bytes_per_s
        found = {name: old.get(name, old[""]) for name in ("", host)}
        # A mean of times, as each byte counts: mean speeds would forget how slow the slow ones are.
        means = {name: 1 / (1 / speed + _WEIGHT * (lasted_s / num_bytes - 1 / speed)) for name, speed in found.items()}
        others = {name: speed for name, speed in old.items() if name not in found}
        kept = list(others.items())[-MAX_HOSTS:]
        self.received_bytes_per_s = {**dict(kept), **means}

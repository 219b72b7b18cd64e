"""Block store in the memory of the host: blocks of one rank of one replica, below a cache that lies on a device.

As in the store on disk, a block is found by its name alone, its digest is checked whenever it is read, and the least
recently used blocks are evicted first, kept ones last. It ends with the process.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.worker.cache.sealing import Sealer, WrongDigestError
from holdfast.worker.request import StoredPin

logger = logging.getLogger(__name__)


class _Kept(NamedTuple):
    tenant: str
    until_s: float


class MemoryStore:
    """Used by one thread at a time."""

    def __init__(self, max_bytes: int, *, clock: Callable[[], float], kept_share: float = 0.25) -> None:
        """`max_bytes` bounds the blocks with their digests. `clock`: in seconds. `kept_share`: share of `max_bytes`
        that the kept blocks of one tenant may take.
        """
        self._max_bytes = max_bytes
        self._most_kept_bytes = int(kept_share * max_bytes)
        self._clock = clock
        self.sealer = Sealer()
        self._records: OrderedDict[bytes, bytearray] = OrderedDict()
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # those kept or renewed longest ago first
        self._changes: dict[bytes, bool] = {}
        """Names since the last `news`: whether they are there now."""
        self.num_bytes = 0
        """Bytes of all blocks and digests."""
        self.num_failures = 0
        """Blocks whose digest was wrong."""

    @property
    def num_blocks(self) -> int:
        return len(self._records)

    def close(self) -> None:
        """Frees the memory."""
        self._records.clear()
        self.num_bytes = 0

    def put(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """Stores blocks by name, except the ones that are there. Returns the number stored. Raises OSError where a
        block does not fit.
        """
        new = [(name, data) for name, data in blocks if name not in self._records]
        for name, data in new:
            record = bytearray().join(self.sealer.seal(name, data))
            self._make_room(len(record))
            self._records[name] = record
            self._changes[name] = True
            self.num_bytes += len(record)
        return len(new)

    def get(self, name: bytes) -> memoryview | None:
        """Content of a block; None if it is missing, or if its digest is wrong: then it is dropped."""
        record = self._records.get(name)
        if record is None:
            return None
        try:
            data = self.sealer.unseal(name, memoryview(record))
        except WrongDigestError:
            self.num_failures += 1
            logger.warning("a block in the host's memory has a wrong digest, and is computed again")
            self._drop(name)
            return None
        self._records.move_to_end(name)
        return data

    def keep(self, names: Sequence[bytes], tenant: str, ttl_s: float) -> None:
        """Does as `BlockStore.keep`; below 0 as with 0."""
        if ttl_s <= 0:
            for name in names or list(self._kept):
                if name in self._kept and self._kept[name].tenant == tenant:
                    del self._kept[name]
            return
        until_s = self._clock() + ttl_s
        for name in reversed(names):  # of those kept together the last gives way first
            before = self._kept.get(name)
            self._kept[name] = _Kept(tenant, until_s if before is None else max(until_s, before.until_s))
            self._kept.move_to_end(name)

    def kept_prefixes(self, kind: bytes) -> list[StoredPin]:
        """None: they end with the process, whose cache lists its pins."""
        return []

    def news(self) -> tuple[list[bytes], list[bytes]]:
        """Names added since the last call, and names removed."""
        changes, self._changes = self._changes, {}
        return [name for name, is_there in changes.items() if is_there], [
            name for name, is_there in changes.items() if not is_there
        ]

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise OSError(f"{num_bytes} bytes do not fit into the block store's {self._max_bytes}")
        if self.num_bytes + num_bytes <= self._max_bytes:
            return
        self._end_kept()
        while self.num_bytes + num_bytes > self._max_bytes:
            first = next((name for name in self._records if name not in self._kept), None)
            self._drop(next(iter(self._records)) if first is None else first)

    def _end_kept(self) -> None:
        """Forgets names whose time is up, and of each tenant those beyond its share."""
        now, sizes = self._clock(), dict[str, int]()
        for name, kept in reversed(list(self._kept.items())):
            size = sizes.get(kept.tenant, 0) + len(self._records.get(name, b""))
            if kept.until_s <= now or size > self._most_kept_bytes:
                del self._kept[name]
            else:
                sizes[kept.tenant] = size

    def _drop(self, name: bytes) -> None:
        self.num_bytes -= len(self._records.pop(name))
        self._changes[name] = False

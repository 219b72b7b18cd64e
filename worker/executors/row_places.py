"""Places of rows in a memory, each with its digest behind it: the form in which blocks go to other replicas."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from xxhash import xxh3_128_digest

from holdfast.worker.executors.block_layout import Bytes

ROW_DIGEST_BYTES: Final = 16


class RowPlaces(NamedTuple):
    """Places of rows of one length."""

    memory: Bytes
    firsts: Sequence[int]
    row_bytes: int
    seeds: Sequence[int] | None = None
    """Seeds of the rows' digests, which are 128-bit XXH3; None: they have none."""
    past_caches: bool = False
    """Rows are written past this core's caches: another one reads them next. They begin at cache lines."""

    @property
    def rows(self) -> list[Bytes]:
        return [self.memory[first : first + self.row_bytes] for first in self.firsts]

    @property
    def are_inside(self) -> bool:
        """Whether the memory has room for all of them, and their digests."""
        most = len(self.memory) - self.row_bytes - (0 if self.seeds is None else ROW_DIGEST_BYTES)
        are_given = self.seeds is None or len(self.seeds) == len(self.firsts)
        return are_given and min(self.firsts, default=0) >= 0 and max(self.firsts, default=most) <= most

    def fill(self, rows: Sequence[Bytes]) -> None:
        """Copies these rows to their places, with their digests."""
        for number, (place, row) in enumerate(zip(self.rows, rows, strict=True)):
            place[:] = row
            if self.seeds is not None:
                end = self.firsts[number] + self.row_bytes
                digest = xxh3_128_digest(place.data, self.seeds[number])
                self.memory[end : end + ROW_DIGEST_BYTES] = np.frombuffer(digest, np.uint8)

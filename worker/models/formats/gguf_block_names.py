"""Types of a GGUF file's tensors that are read, by ggml's names, and orders of their rows. Plain data, for inspection
and for loading.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

FLOATS: Final = ("F32", "F16", "BF16")

BLOCKS: Final[Mapping[str, tuple[int, int]]] = {
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "MXFP4": (32, 17),
}
"""Numbers of a block, and the bytes that it takes."""


def values_of(kind: str) -> int:
    """Values of a block; of a type without blocks 1."""
    return BLOCKS.get(kind, (1, 0))[0]


READ_KINDS: Final = (*FLOATS, *BLOCKS)


class Turn(NamedTuple):
    """The order of rows, or of columns, from one place on: number (a, x, y, b) of [outer, first, second, inner] is
    stored at (a, y, x, b).
    """

    start: int
    outer: int
    first: int
    second: int
    inner: int

    def moves_whole(self, size: int) -> bool:
        """Whether neighbours in parts of this size stay together, or nothing moves."""
        return 1 in (self.first, self.second) or (self.start % size == 0 and self.inner % size == 0)

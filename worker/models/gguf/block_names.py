"""Types of a GGUF file's tensors that are read, by ggml's names. Plain data, for those who look and those who load."""

from collections.abc import Mapping
from typing import Final

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
}
"""Numbers of a block, and the bytes that it takes."""

UNIT_BYTES: Final[Mapping[str, float]] = {
    **{kind: num_bytes / numbers for kind, (numbers, num_bytes) in BLOCKS.items()},
    "Q4_K": 148 / 256,
    "Q5_K": 180 / 256,
}
"""Bytes of a number in units (`native/units.h`): as in the file, but for six bits that become eight."""

READ_KINDS: Final = (*FLOATS, *BLOCKS)

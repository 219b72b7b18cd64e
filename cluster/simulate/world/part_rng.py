"""Random numbers of a simulation by part: a new part changes what no other part draws."""

import random
from collections.abc import Mapping
from typing import Final

_SALTS: Final[Mapping[str, str]] = {"window": "2182", "disk size": "323", "unpin": "95337"}
"""Salts of parts that came later, chosen so that the seeds by which tests find planted mistakes keep their worlds."""


def part_rng(part: str, seed: int) -> random.Random:
    """The generator of this part of the seed's simulation; each call begins it anew."""
    return random.Random(f"{part}{_SALTS.get(part, '')} {seed}")

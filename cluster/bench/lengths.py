"""Length distributions: how many tokens prompts and outputs have, drawn from a seeded generator.

What may not live here: what the tokens are (`prompts.py`), and when requests are sent (`arrivals.py`).
"""

import math
import random
from dataclasses import dataclass
from typing import Final

from holdfast.worker.errors import ConfigurationError

FORMS: Final = "N, uniform:LOW:HIGH, normal:MEAN:DEVIATION, lognormal:MEDIAN:SIGMA or exponential:MEAN"

_KINDS: Final = {"fixed": 1, "uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1}
"""Kinds by name, and how many numbers each has."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens. No length is below 1."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parsed(cls, flag: str, text: str) -> "Lengths":
        """From `128`, `uniform:64:256` and so on. Raises `ConfigurationError`, naming the flag."""
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        if len(values) != _KINDS.get(kind, 0) or not all(math.isfinite(value) and value >= 0 for value in values):
            raise ConfigurationError(f"--{flag} {text}: must be {FORMS}, of numbers of tokens")
        lengths = cls(kind, *values)
        if values[0] < 1 or (kind == "uniform" and values[1] < values[0]):
            raise ConfigurationError(
                f"--{flag} {text}: must be at least 1 token, and no range may end before it begins"
            )
        return lengths

    def draw(self, rng: random.Random) -> int:
        match self.kind:
            case "uniform":
                return rng.randint(int(self.first), int(self.second))
            case "normal":
                drawn = rng.gauss(self.first, self.second)
            case "lognormal":
                drawn = self.first * math.exp(rng.gauss(0.0, self.second))
            case "exponential":
                drawn = rng.expovariate(1 / self.first)
            case _:
                drawn = self.first
        return max(1, round(drawn))

    def __str__(self) -> str:
        numbers = [f"{value:g}" for value in (self.first, self.second)[: _KINDS[self.kind]]]
        return numbers[0] if self.kind == "fixed" else ":".join((self.kind, *numbers))

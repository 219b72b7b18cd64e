"""Arrivals of an open loop: the times at which requests are due, whatever the server does meanwhile.

Drawn from a seed, or read from a trace. An open loop is how independent users load a server; a closed loop (a fixed
number of users, each of whom waits for an answer before asking again) has no arrivals of its own. What may not live
here: waiting for the times (`driver.py`), what is asked (`workload.py`).
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from holdfast.worker.errors import ConfigurationError

PROCESSES: Final = ("poisson", "gamma", "constant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """A renewal process of `rate` arrivals a second."""

    rate: float
    process: str = "poisson"
    burstiness: float = 1.0
    """Shape of the gamma distribution of gaps, as in vLLM's load tool: 1 is Poisson, below 1 comes in bursts, above 1
    is more even. The gaps' coefficient of variation is 1 / sqrt(burstiness)."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ConfigurationError(f"--rate {self.rate:g}: must be above 0 requests a second")
        if self.process not in PROCESSES:
            raise ConfigurationError(f"--arrivals {self.process}: must be among {', '.join(PROCESSES)}")
        if not (math.isfinite(self.burstiness) and self.burstiness > 0):
            raise ConfigurationError(f"--burstiness {self.burstiness:g}: must be above 0")

    def times(self, seed: int) -> Iterator[float]:
        """Seconds from the beginning of the load, without end.

        The gaps of one seed are the same at every rate, to scale: loads of two rates differ in nothing else.
        """
        rng = random.Random(f"{seed}/arrivals")
        now = 0.0
        while True:
            now += self._unit_gap(rng) / self.rate
            yield now

    def _unit_gap(self, rng: random.Random) -> float:
        """A gap of mean 1."""
        match self.process:
            case "poisson":
                return rng.expovariate(1.0)
            case "gamma":
                return rng.gammavariate(self.burstiness, 1 / self.burstiness)
            case _:
                return 1.0

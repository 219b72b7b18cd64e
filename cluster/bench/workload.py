"""Workload: sessions of one or several turns, with their lengths and shared prefixes, generated from a seed or a trace.

The same seed gives the same sessions, however they are then sent. What may not live here: texts (`prompts.py`), times
(`arrivals.py`), sending (`driver.py`).
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from holdfast.cluster.bench.lengths import Lengths
from holdfast.cluster.load_trace import Arrival
from holdfast.worker.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session, and what it adds to the conversation."""

    num_prompt_tokens: int
    """Of the new text alone, prefixes included; the turns before it come on top."""
    max_tokens: int
    prefix: tuple[tuple[int, int], ...] = ()
    """What the text begins with, as (id, number of tokens): texts with equal pieces at the front share them."""


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation. Its turns are asked one after the other, each with what was asked and answered before."""

    number: int
    turns: tuple[Turn, ...]
    start_s: float = 0.0
    """When its first turn is due, in an open loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked."""

    prompt_tokens: Lengths
    output_tokens: Lengths
    num_prefixes: int = 0
    prefix_tokens: int = 0
    num_turns: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_turns < 1:
            raise ConfigurationError(f"--turns {self.num_turns}: must be at least 1")
        if self.num_prefixes < 0:
            raise ConfigurationError(f"--prefixes {self.num_prefixes}: must not be below 0")
        if (self.num_prefixes > 0) != (self.prefix_tokens > 0):
            given = f"--prefixes {self.num_prefixes} --prefix-tokens {self.prefix_tokens}"
            raise ConfigurationError(f"{given}: must be above 0 both, or neither")

    def sessions(self, first_number: int = 0) -> Iterator[Session]:
        """Without end. The lengths are the same whichever number is the first; the texts go by the numbers."""
        rng = random.Random(f"{self.seed}/lengths")
        for number in count(first_number):
            yield Session(number, tuple(self._turn(rng, is_first=not index) for index in range(self.num_turns)))

    def _turn(self, rng: random.Random, *, is_first: bool) -> Turn:
        own = self.prompt_tokens.draw(rng)
        max_tokens = self.output_tokens.draw(rng)
        if not (self.num_prefixes and is_first):
            return Turn(own, max_tokens)
        prefix = ((rng.randrange(self.num_prefixes), self.prefix_tokens),)
        return Turn(self.prefix_tokens + own, max_tokens, prefix)


def traced(arrivals: Sequence[Arrival], speed: float = 1.0, first_number: int = 0) -> list[Session]:
    """The sessions of a trace: one turn each, the first due at once, `speed` times as fast as it was recorded."""
    if not speed > 0:
        raise ConfigurationError(f"--trace-speed {speed:g}: must be above 0")
    first_s = arrivals[0].arrival_s
    return [
        Session(
            number,
            (Turn(one.num_prompt_tokens, one.num_output_tokens, one.prefix),),
            (one.arrival_s - first_s) / speed,
        )
        for number, one in enumerate(arrivals, start=first_number)
    ]

"""The load of the GPU measurements, and what a system that has served it tells: the same for ours and for others."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.gpu.findings import Row


@dataclass(frozen=True, slots=True)
class Wish:
    """A request: its prompt, and how many tokens it draws."""

    prompt: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSizes:
    """How large the load is."""

    num_requests: int = 256
    fewest: int = 100
    most: int = 1024
    """Tokens of prompts and of outputs, each drawn evenly between the two."""
    first_prompts: tuple[int, ...] = (128, 1024)
    """Prompts whose first token is waited for, with nothing else running."""
    repeats: int = 9


TINY: Final = LoadSizes(num_requests=4, fewest=4, most=8, first_prompts=(6,), repeats=2)


def wishes(sizes: LoadSizes, vocab_size: int) -> list[Wish]:
    """The requests of the sustained load; random tokens, so that no prompt shares its beginning with another."""
    rng = random.Random(0)

    def length() -> int:
        return rng.randint(sizes.fewest, sizes.most)

    return [Wish(_tokens(rng, length(), vocab_size), length()) for _ in range(sizes.num_requests)]


def first_wishes(sizes: LoadSizes, vocab_size: int) -> list[list[Wish]]:
    """Requests of one token each, for each length of prompt as many as are measured, and one before them."""
    rng = random.Random(1)
    return [
        [Wish(_tokens(rng, count, vocab_size), 1) for _ in range(sizes.repeats + 1)] for count in sizes.first_prompts
    ]


def _tokens(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, vocab_size) for _ in range(count))


def first_row(name: str, wanted: Sequence[Wish], seconds: Sequence[float]) -> Row:
    """The waits for first tokens; the first of them does not count."""
    times = sorted(seconds[1:])
    return {
        "first token": name,
        "prompt": len(wanted[0].prompt),
        "median ms": statistics.median(times) * 1e3,
        "worst ms": times[-1] * 1e3,
    }


def sustained_row(name: str, load: Sequence[Wish], duration_s: float, utilization: float) -> Row:
    """`utilization`: the mean of what the driver says, 0 to 1."""
    drawn, read = sum(wish.num_tokens for wish in load), sum(len(wish.prompt) for wish in load)
    return {
        "sustained": name,
        "requests": len(load),
        "seconds": duration_s,
        "output tokens/s": drawn / duration_s,
        "prompt tokens/s": read / duration_s,
        "utilization": utilization,
    }

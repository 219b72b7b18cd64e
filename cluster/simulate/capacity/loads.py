"""Made-up loads whose rate changes: a burst, a ramp, a day, spells. Poisson arrivals, thinned from the highest rate.

What may not live here: reading traces (`trace.py`), and serving them (`elastic.py`).
"""

import bisect
import math
import random
from collections.abc import Callable

from holdfast.cluster.load_trace import Arrival

Rate = Callable[[float], float]
"""Requests a second at a time, in seconds from the beginning."""


def arrivals(
    rate: Rate, highest: float, duration_s: float, mean_prompt: int, mean_output: int, seed: int
) -> list[Arrival]:
    """Requests at a rate that is never above `highest`. Lengths are uniform, from half the mean to one and a half."""
    rng = random.Random(seed)
    found, now_s = list[Arrival](), 0.0
    while (now_s := now_s + rng.expovariate(highest)) < duration_s:
        if rng.random() * highest < rate(now_s):
            found.append(
                Arrival(
                    arrival_s=now_s,
                    num_prompt_tokens=rng.randint(mean_prompt // 2, mean_prompt * 3 // 2),
                    num_output_tokens=rng.randint(mean_output // 2, mean_output * 3 // 2),
                )
            )
    return found


def burst(low: float, high: float, from_s: float, to_s: float) -> Rate:
    """`low`, but for a time with `high`."""
    return lambda now_s: high if from_s <= now_s < to_s else low


def ramp(low: float, high: float, duration_s: float) -> Rate:
    """From `low` to `high` in the first half, and back."""
    half_s = duration_s / 2
    return lambda now_s: low + (high - low) * (1 - abs(now_s - half_s) / half_s)


def day(low: float, high: float, period_s: float) -> Rate:
    """A sine between `low`, at the beginning, and `high`."""
    return lambda now_s: low + (high - low) * (1 - math.cos(2 * math.pi * now_s / period_s)) / 2


def spells(low: float, high: float, mean_s: float, duration_s: float, seed: int) -> Rate:
    """Quiet and busy spells in turn, of exponential lengths, as recorded traffic has them."""
    rng = random.Random(seed)
    ends, now_s = list[float](), 0.0
    while now_s < duration_s:
        now_s += rng.expovariate(1 / mean_s)
        ends.append(now_s)
    return lambda now_s: (low, high)[bisect.bisect_right(ends, now_s) % 2]

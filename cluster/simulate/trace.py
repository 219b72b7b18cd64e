"""A load to be served: when requests arrive, and how long they are. Read from a file, or made up.

What may not live here: serving it (`capacity.py`).
"""

import csv
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a load."""

    arrival_s: float
    """Seconds since the load began."""
    num_prompt_tokens: int
    num_output_tokens: int

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Arrival":
        """From the fields of a file. Raises `ValueError` for what is missing or cannot be."""
        missing = {"arrival_s", "num_prompt_tokens", "num_output_tokens"} - entry.keys()
        if missing:
            raise ValueError(f"no {', '.join(sorted(missing))}")
        arrival = cls(
            arrival_s=float(entry["arrival_s"]),
            num_prompt_tokens=int(entry["num_prompt_tokens"]),
            num_output_tokens=int(entry["num_output_tokens"]),
        )
        if arrival.arrival_s < 0 or arrival.num_prompt_tokens < 1 or arrival.num_output_tokens < 1:
            raise ValueError("arrival_s must not be below 0, the numbers of tokens not below 1")
        return arrival


def read_trace(path: Path) -> list[Arrival]:
    """A load in order of arrival, from JSON lines or CSV with a header. Raises `ConfigurationError`, saying where."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--trace {path}: {error}") from error
    is_csv = path.suffix == ".csv"
    entries: Iterable[Any] = csv.DictReader(lines) if is_csv else (json.loads(line) for line in lines if line.strip())
    arrivals: list[Arrival] = []
    try:
        arrivals.extend(Arrival.of(entry) for entry in entries)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"--trace {path}: request {len(arrivals) + 1}: {error}") from error
    if not arrivals:
        raise ConfigurationError(f"--trace {path}: holds no request")
    return sorted(arrivals, key=lambda arrival: arrival.arrival_s)


def made_up_trace(
    *, rate: float, num_requests: int, mean_prompt: int, mean_output: int, max_len: int, seed: int
) -> list[Arrival]:
    """Poisson arrivals at `rate` a second; lengths are exponential around their means, within `max_len` together."""
    rng = random.Random(seed)
    arrivals = []
    now = 0.0
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        num_prompt_tokens = min(1 + int(rng.expovariate(1 / mean_prompt)), max_len // 2)
        num_output_tokens = min(1 + int(rng.expovariate(1 / mean_output)), max_len // 2)
        arrivals.append(
            Arrival(arrival_s=now, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens)
        )
    return arrivals

"""Load trace: when requests arrive, and how long they are. Read from a file, or generated.

What may not live here: serving it (`capacity.py`).
"""

import csv
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.worker.errors import ConfigurationError

HASH_ID_TOKENS: Final = 512
"""Prompt tokens that each of a trace's `hash_ids` stands for."""

_NAMES: Final = {"num_prompt_tokens": "input_length", "num_output_tokens": "output_length"}
"""Ours, and those of the published traces that come with `timestamp` (milliseconds) and `hash_ids`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a load."""

    arrival_s: float
    """Seconds since the load began."""
    num_prompt_tokens: int
    num_output_tokens: int
    prefix: tuple[tuple[int, int], ...] = ()
    """What the prompt begins with, as (id, number of tokens): prompts with equal pieces at the front share them."""

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Arrival":
        """From the fields of a file. Raises `ValueError` for what is missing or cannot be."""
        named = {name: entry.get(name, entry.get(other)) for name, other in _NAMES.items()}
        named["arrival_s"] = _arrival_s(entry)
        missing = sorted(name for name, value in named.items() if value is None)
        if missing:
            raise ValueError(f"no {', '.join(missing)}")
        arrival = cls(
            arrival_s=float(named["arrival_s"]),
            num_prompt_tokens=int(named["num_prompt_tokens"]),
            num_output_tokens=int(named["num_output_tokens"]),
            prefix=tuple((int(hash_id), HASH_ID_TOKENS) for hash_id in entry.get("hash_ids", ())),
        )
        if arrival.arrival_s < 0 or arrival.num_prompt_tokens < 1 or arrival.num_output_tokens < 1:
            raise ValueError("arrival_s must not be below 0, the numbers of tokens not below 1")
        return arrival

    def prompt_token_ids(self, number: int) -> tuple[int, ...]:
        """A prompt of the right length: its prefix, and then tokens that no other `number` has."""
        token_ids = [2 * name for name, num_tokens in self.prefix for _ in range(num_tokens)]
        num_own = max(0, self.num_prompt_tokens - len(token_ids))
        return (*token_ids[: self.num_prompt_tokens], *(2 * number + 1,) * num_own)


def _arrival_s(entry: Mapping[str, Any]) -> Any:
    if "arrival_s" in entry or "timestamp" not in entry:
        return entry.get("arrival_s")
    return float(entry["timestamp"]) / 1000


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
    *,
    rate: float,
    num_requests: int,
    mean_prompt: int,
    mean_output: int,
    max_len: int,
    seed: int,
    num_prefixes: int = 0,
    prefix_len: int = 0,
) -> list[Arrival]:
    """Poisson arrivals at `rate` a second; lengths are exponential around their means, within `max_len` together.

    With `num_prefixes`, one of so many prefixes of `prefix_len` tokens comes before each prompt.
    """
    rng = random.Random(seed)
    arrivals = []
    now = 0.0
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        num_own_tokens = min(1 + int(rng.expovariate(1 / mean_prompt)), max_len // 2 - prefix_len)
        num_output_tokens = min(1 + int(rng.expovariate(1 / mean_output)), max_len // 2)
        arrivals.append(
            Arrival(
                arrival_s=now,
                num_prompt_tokens=prefix_len + num_own_tokens,
                num_output_tokens=num_output_tokens,
                prefix=((rng.randrange(num_prefixes), prefix_len),) if num_prefixes else (),
            )
        )
    return arrivals

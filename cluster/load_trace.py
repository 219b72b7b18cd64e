"""Load trace: when requests arrive, and how long they are. Read from a file, or generated.

The published formats that are read: Mooncake's (JSON lines with `timestamp` in milliseconds, `input_length`,
`output_length`, `hash_ids`), Azure's LLM inference traces (CSV: TIMESTAMP, ContextTokens, GeneratedTokens) and
BurstGPT's (CSV: Timestamp in seconds, Request tokens, Response tokens).
"""

import csv
import json
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from holdfast.worker.errors import ConfigurationError

HASH_ID_TOKENS: Final = 512
"""Prompt tokens that each of a trace's `hash_ids` stands for."""

_NAMES: Final = {
    "num_prompt_tokens": ("num_prompt_tokens", "input_length", "ContextTokens", "Request tokens"),
    "num_output_tokens": ("num_output_tokens", "output_length", "GeneratedTokens", "Response tokens"),
    "arrival_s": ("arrival_s", "timestamp", "TIMESTAMP", "Timestamp"),
}
"""Ours, and then Mooncake's, Azure's and BurstGPT's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a load."""

    arrival_s: float
    """Seconds since the load began."""
    num_prompt_tokens: int
    num_output_tokens: int
    prefix: tuple[tuple[int, int], ...] = ()
    """Pieces that the prompt begins with, as (id, number of tokens): prompts with equal pieces at the front share them.
    """
    adapter: int | None = None
    """Number of the LoRA adapter that it runs with; None: the model alone."""

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Arrival":
        """Made from the fields of a file. Raises `ValueError` for missing or impossible values."""
        named = {name: _first_of(entry, names) for name, names in _NAMES.items()}
        missing = sorted(name for name, value in named.items() if value is None)
        if missing:
            known = ", ".join(" or ".join(_NAMES[name]) for name in missing)
            raise ValueError(f"no {', '.join(missing)} (in a published trace: {known})")
        arrival = cls(
            arrival_s=_arrival_s(entry, named["arrival_s"]),
            num_prompt_tokens=int(named["num_prompt_tokens"]),
            num_output_tokens=int(named["num_output_tokens"]),
            prefix=tuple((int(hash_id), HASH_ID_TOKENS) for hash_id in entry.get("hash_ids", ())),
        )
        if not 0 <= arrival.arrival_s < math.inf or arrival.num_prompt_tokens < 1 or arrival.num_output_tokens < 1:
            raise ValueError("the arrival must be a number of 0 or more, the numbers of tokens at least 1")
        return arrival

    def prompt_token_ids(self, number: int) -> tuple[int, ...]:
        """A prompt of the right length: its prefix, and then tokens that occur in no other prompt."""
        token_ids = [2 * name for name, num_tokens in self.prefix for _ in range(num_tokens)]
        num_own = max(0, self.num_prompt_tokens - len(token_ids))
        return (*token_ids[: self.num_prompt_tokens], *(2 * number + 1,) * num_own)


def _first_of(entry: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((entry[name] for name in names if entry.get(name) is not None), None)


def _arrival_s(entry: Mapping[str, Any], value: Any) -> float:
    """Azure's are dates, in UTC unless they say otherwise; Mooncake's milliseconds; all others seconds."""
    if "TIMESTAMP" in entry:
        moment = datetime.fromisoformat(str(value))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    is_mooncakes = "arrival_s" not in entry and "timestamp" in entry
    return float(value) / 1000 if is_mooncakes else float(value)


def read_trace(path: Path) -> list[Arrival]:
    """A load in order of arrival, from JSON lines or CSV with a header. Dates count from the first of them.

    Raises `ConfigurationError`, saying where.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--trace {path}: {error}") from error
    is_csv = path.suffix == ".csv"
    entries: Iterable[Any] = csv.DictReader(lines) if is_csv else (json.loads(line) for line in lines if line.strip())
    arrivals: list[Arrival] = []
    has_dates = is_csv and "TIMESTAMP" in lines[0].split(",") if lines else False
    try:
        # BurstGPT keeps requests that failed, with no response tokens: they are no load that a server can be given.
        arrivals.extend(Arrival.of(entry) for entry in entries if entry.get("Response tokens") != "0")
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"--trace {path}: request {len(arrivals) + 1}: {error}") from error
    if not arrivals:
        raise ConfigurationError(f"--trace {path}: holds no request")
    arrivals.sort(key=lambda arrival: arrival.arrival_s)
    first_s = arrivals[0].arrival_s if has_dates else 0.0
    return [replace(arrival, arrival_s=arrival.arrival_s - first_s) for arrival in arrivals]


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
    num_adapters: int = 0,
) -> list[Arrival]:
    """Poisson arrivals at `rate` a second; lengths are exponential around their means, within `max_len` together.

    With `num_prefixes`, one of this many prefixes of `prefix_len` tokens comes before each prompt; with `num_adapters`,
    each request has one of this many adapters.
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
                adapter=rng.randrange(num_adapters) if num_adapters else None,
            )
        )
    return arrivals

"""Service level objective: limits of latency, and whether a request kept to them. No IO."""

import re
from dataclasses import dataclass
from typing import Final

from holdfast.cluster.bench.records import RequestRecord
from holdfast.worker.errors import ConfigurationError

METRICS: Final = ("ttft", "tpot", "e2e")
_UNITS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True, slots=True)
class Slo:
    """The most that each metric may take, in seconds, by name."""

    limits_s: tuple[tuple[str, float], ...]

    @classmethod
    def parsed(cls, text: str) -> "Slo":
        """From `ttft=500ms,tpot=50ms`. Raises `ConfigurationError`."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            found = re.fullmatch(r"\s*(\w+)\s*=\s*([\d.]+)\s*(us|ms|s)\s*", part)
            if found is None or found[1] not in METRICS or found[1] in limits or not _number(found[2]) > 0:
                expected = "must be limits with commas in between, like ttft=500ms,tpot=50ms,e2e=10s"
                raise ConfigurationError(f"--slo {text}: {expected} (of {', '.join(METRICS)}; in s, ms or us)")
            limits[found[1]] = _number(found[2]) * _UNITS[found[3]]
        return cls(tuple(limits.items()))

    def is_met(self, record: RequestRecord) -> bool:
        """Of a request that failed, never. A metric that a request does not have is met."""
        if record.error is not None or not record.piece_s:
            return False
        values = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2e": record.e2e_s}
        return all((value := values[name]) is None or value <= limit for name, limit in self.limits_s)

    def __str__(self) -> str:
        return ",".join(f"{name}={1000 * limit:g}ms" for name, limit in self.limits_s)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0

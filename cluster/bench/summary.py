"""Figures of a run, from the records of its requests: percentiles, throughput, goodput, errors, time line. No IO."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from holdfast.cluster.bench.report import Distribution, Load, Moment, Request, Run, Turns
from holdfast.worker.errors import ConfigurationError


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Times are seconds from the beginning of the load."""

    session: int
    turn: int
    due_s: float
    """When it was to be sent. Latencies count from here, so time in the tool's own queue counts too."""
    sent_s: float = 0.0
    end_s: float = 0.0
    piece_s: list[float] = field(default_factory=list)
    """When each piece of output came. A piece has one token or several, as the server sends them."""
    silent_end_s: float = 0.0
    """When the output ended, where that came after its last piece: with a token that has no text."""
    num_output_tokens: int = 0
    num_prompt_tokens: int | None = None
    """Prompt tokens as counted by the server; None if the server reports no count."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the server had in its caches; None if it does not say."""
    error: str | None = None
    """The kind of its failure; None: it was answered to the end."""
    message: str = ""
    is_cut: bool = False
    """The request was in flight when the run was interrupted: it says nothing about the server."""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from when it was due."""
        return self.piece_s[0] - self.due_s if self.piece_s else None

    @property
    def e2e_s(self) -> float | None:
        """Seconds from the time the request was due to its last token."""
        return None if self.last_s is None else self.last_s - self.due_s

    @property
    def last_s(self) -> float | None:
        """When the last token came; None: there was no output."""
        return max(self.piece_s[-1], self.silent_end_s) if self.piece_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None if no further token came."""
        last_s = self.last_s
        if last_s is None or len(self.piece_s) < 2 or self.num_output_tokens < 2:
            return None
        return (last_s - self.piece_s[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies: the gaps between pieces."""
        return [later - earlier for earlier, later in zip(self.piece_s, self.piece_s[1:], strict=False)]


METRICS: Final = ("ttft", "tpot", "e2e")
_UNITS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True, slots=True)
class Slo:
    """The most that each metric may take, in seconds, by name."""

    limits_s: tuple[tuple[str, float], ...]

    @classmethod
    def parsed(cls, text: str) -> "Slo":
        """Parses `ttft=500ms,tpot=50ms`. Raises `ConfigurationError`."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            found = re.fullmatch(r"\s*(\w+)\s*=\s*([\d.]+)\s*(us|ms|s)\s*", part)
            if found is None or found[1] not in METRICS or found[1] in limits or not _number(found[2]) > 0:
                expected = "must be limits with commas in between, like ttft=500ms,tpot=50ms,e2e=10s"
                raise ConfigurationError(f"--slo {text}: {expected} (of {', '.join(METRICS)}; in s, ms or us)")
            limits[found[1]] = _number(found[2]) * _UNITS[found[3]]
        return cls(tuple(limits.items()))

    def is_met(self, record: RequestRecord) -> bool:
        """Whether the request met the objective. A failed request never does; a metric that the request does not have
        is met.
        """
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


_NUM_MOMENTS: Final = 60


def percentile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest values, linearly, as NumPy has it. `ordered` is not empty; `share` in [0, 1]."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Distribution of the values that are not None; None if there are none."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    return Distribution(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p95=percentile(ordered, 0.95),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
        quantiles=[round(percentile(ordered, rank / 100), 6) for rank in range(101)],
    )


def summary(
    load: Load,
    records: Sequence[RequestRecord],
    slo: Slo | None,
    sending_s: float | None = None,
    *,
    is_interrupted: bool = False,
) -> Run:
    """Latencies are those of requests that were answered to the end; `records` is not empty.

    The run lasts at least `sending_s`: an open loop of 10 seconds whose last request came after 8 took 10.
    """
    done = [record for record in records if record.error is None]
    failed = [record for record in records if record.error is not None]
    duration_s = max(max(record.end_s for record in records), sending_s or 0.0, 1e-9)
    num_output = sum(record.num_output_tokens for record in done)
    num_prompt = sum(record.num_prompt_tokens or 0 for record in done)
    good = None if slo is None else sum(map(slo.is_met, records))
    return Run(
        load=load,
        interrupted=is_interrupted,
        duration_s=duration_s,
        requests=len(records),
        completed=len(done),
        failed=len(failed),
        errors=dict(Counter(str(record.error) for record in failed).most_common()),
        error_examples={str(record.error): record.message for record in reversed(failed)},
        prompt_tokens=num_prompt,
        output_tokens=num_output,
        requests_per_s=len(done) / duration_s,
        output_tokens_per_s=num_output / duration_s,
        total_tokens_per_s=(num_prompt + num_output) / duration_s,
        good=good,
        goodput=None if good is None else good / duration_s,
        attainment=None if good is None else good / len(records),
        ttft_s=distribution(record.ttft_s for record in done),
        tpot_s=distribution(record.tpot_s for record in done),
        itl_s=distribution(gap for record in done for gap in record.gaps_s),
        e2e_s=distribution(record.e2e_s for record in done),
        lateness_s=distribution(record.sent_s - record.due_s for record in records),
        turns=turns(done) if any(record.turn for record in records) else None,
        timeline=timeline(records, duration_s),
        each_request=[_request(record) for record in records],
    )


_KEPT: Final = 0.9  # share of a turn's prompt that is cached


def turns(done: Sequence[RequestRecord]) -> Turns:
    """Figures of conversations. A server that tells of cached tokens in some replies had none in the others."""
    has_cache_counts = any(record.num_cached_tokens is not None for record in done)
    num_cached = sum(record.num_cached_tokens or 0 for record in done)
    num_prompt = sum(record.num_prompt_tokens or 0 for record in done)
    by_session: dict[int, list[RequestRecord]] = {}
    for record in done:
        by_session.setdefault(record.session, []).append(record)
    return Turns(
        sessions=len(by_session),
        sessions_kept=sum(map(_is_kept, by_session.values())) if has_cache_counts else None,
        cached_tokens=num_cached if has_cache_counts else None,
        hit_rate=num_cached / num_prompt if has_cache_counts and num_prompt else None,
        seen_rate=sum(map(_num_seen, by_session.values())) / num_prompt if num_prompt else None,
        first_ttft_s=distribution(record.ttft_s for record in done if record.turn == 0),
        later_ttft_s=distribution(record.ttft_s for record in done if record.turn > 0),
    )


def _is_kept(session: Sequence[RequestRecord]) -> bool:
    """Whether each turn of a session found the prompt of the turn before, but for a tenth."""
    return all(
        (later.num_cached_tokens or 0) >= _KEPT * (earlier.num_prompt_tokens or 0)
        for earlier, later in _in_a_row(session)
    )


def _num_seen(session: Sequence[RequestRecord]) -> int:
    """Prompt tokens of a session's turns that were prompt or output of the turn before."""
    return sum(
        min(later.num_prompt_tokens or 0, (earlier.num_prompt_tokens or 0) + earlier.num_output_tokens)
        for earlier, later in _in_a_row(session)
    )


def _in_a_row(session: Sequence[RequestRecord]) -> Iterator[tuple[RequestRecord, RequestRecord]]:
    """Turns of a session, each with the next one."""
    return pairwise(sorted(session, key=lambda record: record.turn))


def timeline(records: Sequence[RequestRecord], duration_s: float) -> list[Moment]:
    """Some 60 equal intervals. A record's output tokens are spread over its pieces."""
    width_s = duration_s / _NUM_MOMENTS
    busy, tokens, done, failed = ([0.0] * _NUM_MOMENTS for _ in range(4))

    def interval(time_s: float) -> int:
        return min(max(int(time_s / width_s), 0), _NUM_MOMENTS - 1)

    for record in records:
        (done if record.error is None else failed)[interval(record.end_s)] += 1
        each = record.num_output_tokens / len(record.piece_s) if record.piece_s else 0.0
        for piece_s in record.piece_s:
            tokens[interval(piece_s)] += each
        for index in range(interval(record.due_s), interval(record.end_s) + 1):
            left, right = index * width_s, (index + 1) * width_s
            busy[index] += max(0.0, min(record.end_s, right) - max(record.due_s, left))
    return [
        Moment(
            time_s=round(index * width_s, 6),
            in_flight=busy[index] / width_s,
            output_tokens_per_s=tokens[index] / width_s,
            completed_per_s=done[index] / width_s,
            failed_per_s=failed[index] / width_s,
        )
        for index in range(_NUM_MOMENTS)
    ]


def _request(record: RequestRecord) -> Request:
    return Request(
        session=record.session,
        turn=record.turn,
        due_s=round(record.due_s, 6),
        sent_s=round(record.sent_s, 6),
        first_s=round(record.piece_s[0], 6) if record.piece_s else None,
        last_s=None if record.last_s is None else round(record.last_s, 6),
        prompt_tokens=record.num_prompt_tokens,
        cached_tokens=record.num_cached_tokens,
        output_tokens=record.num_output_tokens,
        error=record.error,
    )

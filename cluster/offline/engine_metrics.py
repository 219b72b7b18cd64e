"""Metrics of an engine in the shape and by the names of vLLM's `LLM.get_metrics`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from holdfast.worker.stats import EngineStats

PREFIX: Final = "vllm:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """It only grows."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """It goes up and down."""

    value: float


def metrics_of(stats: EngineStats, model: str) -> list[Metric]:
    labels = {"model_name": model}
    counters = [Counter(name=PREFIX + name, labels=labels, value=value) for name, value in _counts(stats)]
    gauges = [Gauge(name=PREFIX + name, labels=labels, value=value) for name, value in _levels(stats)]
    return [*gauges, *counters]


def _counts(stats: EngineStats) -> Iterator[tuple[str, int]]:
    yield "prompt_tokens", stats.num_prefix_query_tokens
    yield "generation_tokens", stats.num_tokens_generated
    yield "prefix_cache_queries", stats.num_prefix_query_tokens
    yield "prefix_cache_hits", stats.num_prefix_hit_tokens
    yield "num_preemptions", stats.num_preemptions
    yield "request_success", stats.num_finished
    yield "spec_decode_num_draft_tokens", stats.num_draft_tokens
    yield "spec_decode_num_accepted_tokens", stats.num_accepted_tokens


def _levels(stats: EngineStats) -> Iterator[tuple[str, float]]:
    yield "num_requests_running", stats.num_running
    yield "num_requests_waiting", stats.num_waiting
    yield "kv_cache_usage_perc", stats.num_used_blocks / max(1, stats.num_total_blocks)

"""Samples of replicas, by the names of the catalogue: the same at a router, which hears of them, and at a replica.

What may not live here: counting (`worker/stats.py`).
"""

from collections.abc import Iterator
from typing import Final

from holdfast.router.metrics.exposition import Sample
from holdfast.worker.histogram import TOKEN_TIMES_S, Histogram
from holdfast.worker.request import EngineLoad
from holdfast.worker.stats import EngineStats

COUNTS: Final = {
    "num_tokens_generated": "output_tokens",
    "num_tokens_computed": "computed_tokens",
    "num_tokens_recomputed": "recomputed_tokens",
    "num_preemptions": "preemptions",
    "num_evictions": "evictions",
    "num_expired": "expired",
    "num_prefix_query_tokens": "prefix_query_tokens",
    "num_prefix_hit_tokens": "prefix_hit_tokens",
    "num_draft_tokens": "draft_tokens",
    "num_accepted_tokens": "accepted_tokens",
    "num_steps": "steps",
}
"""Fields of `EngineStats`, and the middle of their names."""


def replica_samples(model: str, replica: str, load: EngineLoad, stats: EngineStats | None) -> Iterator[Sample]:
    """`stats` None: the replica has not told any yet."""
    labels, prefix = (model, replica), "holdfast_replica_"
    yield Sample(f"{prefix}requests_running", labels, load.num_running)
    yield Sample(f"{prefix}requests_waiting", labels, load.num_waiting)
    yield Sample(f"{prefix}waiting_tokens", labels, load.num_waiting_tokens)
    yield Sample(f"{prefix}kv_cache_usage_ratio", labels, kv_usage(load))
    if stats is None:
        return
    num_cached = min(stats.num_cached_blocks, load.num_free_blocks)
    blocks = {
        "used": load.num_total_blocks - load.num_free_blocks,
        "cached": num_cached,
        "empty": load.num_free_blocks - num_cached,
    }
    for state, count in blocks.items():
        yield Sample(f"{prefix}kv_blocks", (*labels, state), count)
    for field, name in COUNTS.items():
        yield Sample(f"{prefix}{name}_total", labels, getattr(stats, field))
    times = {"plan": stats.plan_time_s, "run": stats.step_time_s, "commit": stats.commit_time_s}
    for phase, seconds in times.items():
        yield Sample(f"{prefix}step_phase_seconds_total", (*labels, phase), seconds)
    yield Sample(f"{prefix}step_seconds", labels, Histogram(TOKEN_TIMES_S, stats.step_counts, sum(times.values())))
    if stats.gpu_memory_total_bytes:
        yield Sample(f"{prefix}gpu_utilization_ratio", labels, stats.gpu_utilization)
        yield Sample(f"{prefix}gpu_memory_used_bytes", labels, stats.gpu_memory_used_bytes)
        yield Sample(f"{prefix}gpu_memory_total_bytes", labels, stats.gpu_memory_total_bytes)


def gateway_samples(
    model: str,
    *,
    num_running: int,
    num_waiting: int,
    num_free_blocks: int,
    num_total_blocks: int,
    block_size: int,
    num_blocks: int,
) -> Iterator[Sample]:
    """What the Gateway API Inference Extension scrapes, by vLLM's names."""
    usage = 1 - num_free_blocks / num_total_blocks if num_total_blocks else 0.0
    yield Sample("vllm:num_requests_running", (model,), num_running)
    yield Sample("vllm:num_requests_waiting", (model,), num_waiting)
    yield Sample("vllm:kv_cache_usage_perc", (model,), usage)
    yield Sample("vllm:cache_config_info", (model, str(block_size), str(num_blocks)), 1)


def process_samples(version: str) -> Iterator[Sample]:
    """Of any process of ours that is scraped."""
    yield Sample("vllm:lora_requests_info", ("0", "", ""), 1)
    yield Sample("holdfast_build_info", (version,), 1)


def kv_usage(load: EngineLoad) -> float:
    """Share of the blocks that are in use."""
    return 1 - load.num_free_blocks / max(1, load.num_total_blocks)

"""Exposition of samples in Prometheus' text format, by the catalogue.

prometheus-client is imported when it is first asked for.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any, Final, NamedTuple, Protocol

from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.dispatch.request_stats import DispatchStats
from holdfast.router.events import StoreFigures
from holdfast.router.metrics.catalogue import METRICS, Metric, MetricType
from holdfast.router.overload.overload import Overload, OverloadAction
from holdfast.router.requests.poison_watch import PoisonWatch
from holdfast.router.requests.request_stats import ModelStats, RequestStats
from holdfast.worker.request import EngineLoad, Priority
from holdfast.worker.step_update import TOKEN_TIMES_S, EngineStats, Histogram
from holdfast.worker.wire.tls import Certificates


class Sample(NamedTuple):
    """One figure."""

    name: str
    labels: tuple[str, ...]
    value: float | Histogram


def exposed(samples: Iterable[Sample]) -> tuple[bytes, str]:
    """The text, and its content type."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(list(_families(samples))))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Collector:
    """Collector that a registry asks."""

    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        return self._families


def _families(samples: Iterable[Sample]) -> Iterator[Any]:
    """Metric families in the catalogue's order; those without a sample are left out."""
    by_name: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_name[sample.name].append(sample)
    unknown = by_name.keys() - METRICS.keys()
    assert not unknown, f"the catalogue has no {', '.join(sorted(unknown))}"
    for name, metric in METRICS.items():
        if name in by_name:
            yield _family(metric, by_name[name])


def _family(metric: Metric, samples: list[Sample]) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    made = {
        MetricType.COUNTER: CounterMetricFamily,
        MetricType.GAUGE: GaugeMetricFamily,
        MetricType.HISTOGRAM: HistogramMetricFamily,
    }
    family: Any = made[metric.kind](metric.name, metric.help, labels=metric.labels)
    for sample in samples:
        assert len(sample.labels) == len(metric.labels), f"{metric.name} has the labels {metric.labels}"
        if isinstance(sample.value, Histogram):
            family.add_metric(sample.labels, _buckets(sample.value), sample.value.total)
        else:
            family.add_metric(sample.labels, sample.value)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, int]]:
    so_far, buckets = 0, []
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        so_far += count
        buckets.append((bound, so_far))
    return buckets


COUNTS: Final = {
    "num_tokens_generated": "output_tokens",
    "num_tokens_computed": "computed_tokens",
    "num_tokens_recomputed": "recomputed_tokens",
    "num_preemptions": "preemptions",
    "num_evictions": "evictions",
    "num_snapshot_hits": "snapshot_hits",
    "num_snapshot_evictions": "snapshot_evictions",
    "num_expired": "expired",
    "num_prefix_query_tokens": "prefix_query_tokens",
    "num_prefix_hit_tokens": "prefix_hit_tokens",
    "num_draft_tokens": "draft_tokens",
    "num_accepted_tokens": "accepted_tokens",
    "num_steps": "steps",
}
"""Fields of `EngineStats`, and the middle of their names."""

TRANSFERS: Final = {
    "num_received_tokens": "received_tokens_total",
    "num_cut_transfers": "cut_transfers_total",
    "num_sent_blocks": "sent_blocks_total",
    "received_bytes": "received_bytes_total",
    "sent_bytes": "sent_bytes_total",
}
"""The same of a replica that takes blocks from others, or sends them."""

ADAPTERS: Final = {"num_resident_adapters": "resident_adapters", "num_adapter_loads": "adapter_loads_total"}
"""The same of a replica that has loaded adapters."""

DISK: Final = {
    "num_disk_blocks": "disk_blocks",
    "disk_bytes": "disk_bytes",
    "disk_backlog_bytes": "disk_backlog_bytes",
    "num_disk_hit_tokens": "disk_hit_tokens_total",
    "num_disk_losses": "disk_losses_total",
    "num_digest_failures": "digest_failures_total",
    "num_disk_errors": "disk_errors_total",
}
"""Fields of `EngineStats`, and the end of their names, of a replica with a store below its cache."""


def replica_samples(model: str, replica: str, load: EngineLoad, stats: EngineStats | None) -> Iterator[Sample]:
    """`stats` None: the replica has reported none yet."""
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
    yield Sample(f"{prefix}pinned_blocks", labels, stats.num_pinned_blocks)
    if stats.num_total_slots:
        num_empty = stats.num_total_slots - stats.num_used_slots - stats.num_cached_slots
        slots = {"used": stats.num_used_slots, "snapshot": stats.num_cached_slots, "empty": num_empty}
        for state, count in slots.items():
            yield Sample(f"{prefix}state_slots", (*labels, state), count)
    transfers = stats.received_bytes or stats.sent_bytes or stats.num_cut_transfers, TRANSFERS
    kinds = (stats.disk_bytes, DISK), transfers, (stats.num_adapter_loads, ADAPTERS)
    for field, name in (item for is_shown, fields in kinds if is_shown for item in fields.items()):
        yield Sample(f"{prefix}{name}", labels, getattr(stats, field))
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
    """Samples that the Gateway API Inference Extension scrapes, by vLLM's names."""
    usage = 1 - num_free_blocks / num_total_blocks if num_total_blocks else 0.0
    yield Sample("vllm:num_requests_running", (model,), num_running)
    yield Sample("vllm:num_requests_waiting", (model,), num_waiting)
    yield Sample("vllm:kv_cache_usage_perc", (model,), usage)
    yield Sample("vllm:cache_config_info", (model, str(block_size), str(num_blocks)), 1)


def process_samples(version: str) -> Iterator[Sample]:
    """Samples of any Holdfast process that is scraped."""
    yield Sample("vllm:lora_requests_info", ("0", "", ""), 1)
    yield Sample("holdfast_build_info", (version,), 1)


def kv_usage(load: EngineLoad) -> float:
    """Share of the blocks that are in use."""
    return 1 - load.num_free_blocks / max(1, load.num_total_blocks)


def store_samples(figures: StoreFigures, num_failures: int) -> Iterator[Sample]:
    """Samples of the job store."""
    yield Sample("holdfast_store_bytes", (), figures.num_bytes)
    yield Sample("holdfast_store_max_bytes", (), figures.max_bytes)
    for kind, count in figures.num_objects.items():
        yield Sample("holdfast_store_objects", (kind,), count)
    for kind in ("response", "line"):
        for state in ("waiting", "running"):
            yield Sample("holdfast_store_jobs", (kind, state), figures.num_jobs.get((kind, state), 0))
    yield Sample("holdfast_store_oldest_job_seconds", (), figures.oldest_job_s)
    yield Sample("holdfast_store_failures_total", (), num_failures)


class ConnectionCounts(Protocol):
    """Counts of clients' connections."""

    @property
    def num_cut(self) -> Mapping[tuple[str, str], int]:
        """Closed connections by protocol and reason."""

    @property
    def num_resets(self) -> int:
        """Calls that were reset."""


def router_samples(
    stats: RequestStats,
    host: DispatchHost,
    responses: Mapping[tuple[str, int], int],
    connections: ConnectionCounts | None = None,
    watch: PoisonWatch | None = None,
    overload: Overload | None = None,
    certificates: Certificates | None = None,
) -> Iterator[Sample]:
    """Current samples. `responses` are those of the HTTP API, by path and status; the `watch` is the router's."""
    if connections is not None:
        for labels, count in connections.num_cut.items():
            yield Sample("holdfast_connections_cut_total", labels, count)
        yield Sample("holdfast_calls_reset_total", (), connections.num_resets)
    for model, one in stats.models.items():
        yield from _of_model(model, one)
    for (path, status), count in responses.items():
        yield Sample("holdfast_http_responses_total", (path, str(status)), count)
    for verdict, count in () if watch is None else (("trial", watch.num_trials), ("refused", watch.num_refused)):
        yield Sample("holdfast_router_suspects_total", (verdict,), count)
    yield Sample("holdfast_requests_open", (), host.dispatch.num_open)
    yield Sample("holdfast_requests_queued", (), host.dispatch.num_queued)
    yield Sample("holdfast_requests_suspended", (), host.dispatch.num_suspended)
    if overload is not None:
        yield from _of_overload(overload)
    for use, expires_s in () if certificates is None else certificates.expiries().items():
        yield Sample("holdfast_certificate_expiry_timestamp_seconds", (use,), expires_s)
    yield from _of_dispatch(host.dispatch.stats)
    yield from _of_replicas(host)
    yield from process_samples(version("holdfast"))


def _of_model(model: str, stats: ModelStats) -> Iterator[Sample]:
    for outcome, count in stats.outcomes.items():
        yield Sample("holdfast_requests_total", (model, outcome), count)
    if not model:
        return
    yield Sample("holdfast_prompt_tokens_total", (model,), stats.num_prompt_tokens)
    yield Sample("holdfast_output_tokens_total", (model,), stats.num_output_tokens)
    yield Sample("holdfast_slow_requests_total", (model,), stats.num_slow)
    yield Sample("holdfast_time_to_first_token_seconds", (model,), stats.first_token_s)
    yield Sample("holdfast_time_per_output_token_seconds", (model,), stats.output_token_s)
    yield Sample("holdfast_request_duration_seconds", (model,), stats.duration_s)
    yield Sample("holdfast_reader_wait_seconds", (model,), stats.reader_wait_s)


def _of_dispatch(stats: DispatchStats) -> Iterator[Sample]:
    for labels, histogram in stats.queue_s.items():
        yield Sample("holdfast_queue_time_seconds", labels, histogram)
    for cause, count in stats.failovers.items():
        yield Sample("holdfast_failovers_total", cause, count)
    for model, count in stats.replayed_tokens.items():
        yield Sample("holdfast_replayed_tokens_total", (model,), count)
    for model, histogram in stats.pause_s.items():
        yield Sample("holdfast_pause_seconds", (model,), histogram)
    for model, count in stats.suspended.items():
        yield Sample("holdfast_suspensions_total", (model,), count)
    for model, count in stats.replicas_lost.items():
        yield Sample("holdfast_replicas_lost_total", (model,), count)


def _of_overload(overload: Overload) -> Iterator[Sample]:
    for resource, pressure in overload.pressures.items():
        yield Sample("holdfast_overload_pressure_ratio", (resource,), pressure)
    for action in OverloadAction:
        yield Sample("holdfast_overload_action_active", (action,), float(action in overload.active))
        yield Sample("holdfast_overload_actions_total", (action,), overload.counts[action])
    yield Sample("holdfast_bytes_in_flight", (), overload.ledger.num_bytes)
    for setting, count in overload.ledger.refusals.items():
        yield Sample("holdfast_byte_budget_refusals_total", (setting,), count)


def _of_replicas(host: DispatchHost) -> Iterator[Sample]:
    loads, waiting = host.dispatch.loads(), host.dispatch.waiting()
    by_class: Counter[tuple[str, str]] = Counter()
    for (model, priority, _), count in waiting.items():
        by_class[model, priority] += count
    for load in loads:
        yield from replica_samples(load.model, load.replica_id, load.load, load.stats)
        if load.role:
            yield Sample("holdfast_replica_role", (load.model, load.replica_id, load.role), 1)
        for sender, num_tokens in load.received_from.items():
            yield Sample("holdfast_transferred_tokens_total", (load.model, sender, load.replica_id), num_tokens)
    for status in host.dispatch.models():
        model, mine = status.name, [one.load for one in loads if one.model == status.name]
        yield Sample("holdfast_model_replicas", (model,), status.num_replicas)
        weights = status.facts
        yield Sample("holdfast_model_weight_bytes", (model, weights.quantization), weights.weight_bytes)
        if status.facts.state_bytes:
            yield Sample("holdfast_model_state_bytes", (model,), status.facts.state_bytes)
        queued = {priority.name.lower(): by_class[model, priority.name.lower()] for priority in Priority}
        for priority, count in queued.items():
            yield Sample("holdfast_requests_queued_by_class", (model, priority), count)
        yield from gateway_samples(
            model,
            num_running=sum(one.num_running for one in mine),
            num_waiting=sum(queued.values()) + sum(one.num_waiting for one in mine),
            num_free_blocks=sum(one.num_free_blocks for one in mine),
            num_total_blocks=sum(one.num_total_blocks for one in mine),
            block_size=status.facts.block_size,
            num_blocks=status.facts.num_blocks,
        )

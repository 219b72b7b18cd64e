"""Catalogue of metrics: name, type, labels and meaning of every figure that Prometheus can scrape. Plain data.

`docs/metrics.md` is generated from it, and published metrics are checked against it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class MetricType(StrEnum):
    """Type of a metric, in Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of figures."""

    name: str
    """Name in queries; of a histogram without `_bucket`, `_sum` and `_count`."""
    kind: MetricType
    labels: tuple[str, ...]
    help: str

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its samples."""
        if self.kind is not MetricType.HISTOGRAM:
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


_MODEL, _REPLICA = ("model",), ("model", "replica")
C, G, H = MetricType.COUNTER, MetricType.GAUGE, MetricType.HISTOGRAM

REQUEST_METRICS: Final = (
    Metric(
        "holdfast_requests_total",
        C,
        ("model", "outcome"),
        "Requests that have ended, through all APIs, by how: stop, length, abort, cancelled, invalid, denied, "
        "rate_limit, capacity, overload, unavailable, deadline, handed_over, internal. Requests refused before their "
        "model was known have an empty one",
    ),
    Metric("holdfast_requests_open", G, (), "Requests that are open in this router"),
    Metric("holdfast_requests_queued", G, (), "Open requests that wait for a replica"),
    Metric(
        "holdfast_requests_queued_by_class",
        G,
        ("model", "class"),
        "Requests that wait for a replica, by priority class",
    ),
    Metric("holdfast_prompt_tokens_total", C, _MODEL, "Tokens of the prompts of ended requests"),
    Metric("holdfast_output_tokens_total", C, _MODEL, "Output tokens of ended requests"),
    Metric("holdfast_time_to_first_token_seconds", H, _MODEL, "Time from a request's admission to its first token"),
    Metric("holdfast_time_per_output_token_seconds", H, _MODEL, "Mean time between the output tokens of a request"),
    Metric("holdfast_request_duration_seconds", H, _MODEL, "Time from a request's admission to its end"),
    Metric(
        "holdfast_queue_time_seconds",
        H,
        ("model", "class", "place"),
        "Waits by priority class: in the router until a request is first sent to a replica, and in each replica that "
        "runs it until it runs there",
    ),
    Metric("holdfast_reader_wait_seconds", H, _MODEL, "How long the output of a request has waited for its reader"),
    Metric("holdfast_slow_requests_total", C, _MODEL, "Requests that took longer than telemetry.slow_request_s"),
    Metric("holdfast_http_responses_total", C, ("path", "status"), "Responses of the HTTP API"),
    Metric(
        "holdfast_router_suspects_total",
        C,
        ("verdict",),
        "Requests that routers were reading when they ended: read alone on trial, and refused as the cause",
    ),
)
FAILOVER_METRICS: Final = (
    Metric(
        "holdfast_failovers_total",
        C,
        ("model", "cause"),
        "Requests sent again to a replica: after a loss, after a return (full or draining), or moved off a draining "
        "replica",
    ),
    Metric("holdfast_replayed_tokens_total", C, _MODEL, "Output tokens that were sent along to be continued after"),
    Metric(
        "holdfast_pause_seconds",
        H,
        _MODEL,
        "Pause that a client sees in a failover: from the end of an attempt that had output to the first output of the "
        "next one",
    ),
    Metric(
        "holdfast_replicas_lost_total", C, _MODEL, "Links to replicas that were lost while the replica was not leaving"
    ),
    Metric("holdfast_model_replicas", G, _MODEL, "Replicas of a model that are up"),
    Metric(
        "holdfast_replica_role", G, ("model", "replica", "role"), "Always 1: a replica is for prefill, decode or both"
    ),
    Metric(
        "holdfast_transferred_tokens_total",
        C,
        ("model", "sender", "replica"),
        "Tokens whose blocks went from a replica to another one",
    ),
    Metric(
        "holdfast_model_state_bytes",
        G,
        ("model",),
        "Memory of one sequence's states (hybrid models), on one rank",
    ),
    Metric(
        "holdfast_model_weight_bytes",
        G,
        ("model", "quantization"),
        "Memory that a model's weights take in one replica, all ranks together, and how they are quantized",
    ),
)
CONNECTION_METRICS: Final = (
    Metric(
        "holdfast_connections_cut_total",
        C,
        ("protocol", "reason"),
        "Clients' connections that the router has closed: resets (limits.max_resets_per_s), calls_without_key "
        "(limits.max_unauthenticated_calls_per_s), connections_without_key (limits.max_unauthenticated_connections)",
    ),
    Metric("holdfast_calls_reset_total", C, (), "Calls over gRPC that their clients have ended within a second"),
    Metric(
        "holdfast_certificate_expiry_timestamp_seconds",
        G,
        ("use",),
        "When the certificate that new connections are shown expires, in seconds since 1970: clients (of the gRPC and "
        "HTTP ports), links (to replicas)",
    ),
)
OVERLOAD_METRICS: Final = (
    Metric(
        "holdfast_overload_pressure_ratio",
        G,
        ("resource",),
        "Use of a router's limits, as a share of each: memory, loop_delay, bytes (in flight, or not read), "
        "requests (open)",
    ),
    Metric(
        "holdfast_overload_action_active",
        G,
        ("action",),
        "Whether the router takes this action against overload, 1 or 0: shrink_heap, stop_accepting, shed_low, "
        "shed_new, close_greediest, shed_resumed",
    ),
    Metric(
        "holdfast_overload_actions_total",
        C,
        ("action",),
        "Effects of each action: connections and requests refused, requests ended, times that memory was given back",
    ),
    Metric("holdfast_bytes_in_flight", G, (), "Bytes of requests that have arrived and are not decoded"),
    Metric(
        "holdfast_byte_budget_refusals_total",
        C,
        ("setting",),
        "Requests refused because a budget of bytes in flight was used up, by the setting of the budget",
    ),
    Metric("holdfast_requests_suspended", G, (), "Open requests that no replica runs, since their clients do not read"),
    Metric(
        "holdfast_suspensions_total",
        C,
        _MODEL,
        "Requests taken off their replica because their clients did not read (limits.max_unread_tokens)",
    ),
)
REPLICA_METRICS: Final = (
    Metric("holdfast_replica_requests_running", G, _REPLICA, "Sequences that a replica runs"),
    Metric("holdfast_replica_requests_waiting", G, _REPLICA, "Sequences that wait in a replica"),
    Metric("holdfast_replica_waiting_tokens", G, _REPLICA, "Tokens of open sequences that are not computed yet"),
    Metric("holdfast_replica_kv_cache_usage_ratio", G, _REPLICA, "Share of a replica's KV blocks that are in use"),
    Metric(
        "holdfast_replica_kv_blocks",
        G,
        ("model", "replica", "state"),
        "KV blocks: used, cached (free, with a prefix that can be reused), or empty",
    ),
    Metric(
        "holdfast_replica_pinned_blocks",
        G,
        _REPLICA,
        "KV blocks of prefixes that requests have asked to keep, used or free",
    ),
    Metric("holdfast_replica_output_tokens_total", C, _REPLICA, "Tokens sampled"),
    Metric("holdfast_replica_computed_tokens_total", C, _REPLICA, "Tokens computed, prompts included"),
    Metric("holdfast_replica_recomputed_tokens_total", C, _REPLICA, "Tokens computed again after a preemption"),
    Metric("holdfast_replica_preemptions_total", C, _REPLICA, "Preemptions: running sequences whose blocks were taken"),
    Metric("holdfast_replica_evictions_total", C, _REPLICA, "Cached blocks that were reused for other tokens"),
    Metric(
        "holdfast_replica_state_slots",
        G,
        ("model", "replica", "state"),
        "State slots of a hybrid model: used, with the snapshot of a prefix, or empty",
    ),
    Metric("holdfast_replica_snapshot_hits_total", C, _REPLICA, "Requests that began from a snapshot of a state"),
    Metric("holdfast_replica_snapshot_evictions_total", C, _REPLICA, "Snapshots whose slots were reused"),
    Metric("holdfast_replica_resident_adapters", G, _REPLICA, "LoRA adapters that are resident"),
    Metric("holdfast_replica_adapter_loads_total", C, _REPLICA, "LoRA adapters that were read and made resident"),
    Metric("holdfast_replica_disk_blocks", G, _REPLICA, "Blocks and snapshots on the disk that the replica can load"),
    Metric("holdfast_replica_disk_bytes", G, _REPLICA, "Size of the block store on the disk of the replica's host"),
    Metric("holdfast_replica_disk_backlog_bytes", G, _REPLICA, "Bytes of blocks that are not yet written to the disk"),
    Metric("holdfast_replica_disk_hit_tokens_total", C, _REPLICA, "Tokens whose blocks came back from the disk"),
    Metric("holdfast_replica_disk_losses_total", C, _REPLICA, "Blocks that were evicted before they were on the disk"),
    Metric(
        "holdfast_replica_digest_failures_total", C, _REPLICA, "Blocks on the disk that were damaged: computed again"
    ),
    Metric("holdfast_replica_disk_errors_total", C, _REPLICA, "Reads and writes of the block store that failed"),
    Metric("holdfast_replica_received_tokens_total", C, _REPLICA, "Tokens whose blocks came from another replica"),
    Metric(
        "holdfast_replica_cut_transfers_total", C, _REPLICA, "Transfers to the replica that did not bring all blocks"
    ),
    Metric("holdfast_replica_sent_blocks_total", C, _REPLICA, "Blocks that were copied for other replicas"),
    Metric("holdfast_replica_received_bytes_total", C, _REPLICA, "Bytes of blocks that came from other replicas"),
    Metric("holdfast_replica_sent_bytes_total", C, _REPLICA, "Bytes of blocks that went to other replicas"),
    Metric(
        "holdfast_replica_expired_total",
        C,
        _REPLICA,
        "Requests dropped because their deadline has passed or cannot be met",
    ),
    Metric("holdfast_replica_prefix_query_tokens_total", C, _REPLICA, "Tokens looked up in the prefix cache"),
    Metric("holdfast_replica_prefix_hit_tokens_total", C, _REPLICA, "Looked-up tokens that were cached"),
    Metric("holdfast_replica_draft_tokens_total", C, _REPLICA, "Draft tokens that were verified"),
    Metric("holdfast_replica_accepted_tokens_total", C, _REPLICA, "Draft tokens that were accepted"),
    Metric("holdfast_replica_steps_total", C, _REPLICA, "Steps of the engine"),
    Metric(
        "holdfast_replica_step_phase_seconds_total",
        C,
        ("model", "replica", "phase"),
        "Time of all steps, split: plan (scheduling), run (the model), commit (taking results in, telling routers)",
    ),
    Metric("holdfast_replica_step_seconds", H, _REPLICA, "Time of one step: plan, run and commit together"),
    Metric(
        "holdfast_replica_gpu_utilization_ratio", G, _REPLICA, "GPU of the leading rank: share of time spent computing"
    ),
    Metric("holdfast_replica_gpu_memory_used_bytes", G, _REPLICA, "Memory in use on the leading rank's GPU"),
    Metric("holdfast_replica_gpu_memory_total_bytes", G, _REPLICA, "Memory of the leading rank's GPU"),
)
STORE_METRICS: Final = (
    Metric("holdfast_store_bytes", G, (), "Size of the stored objects of all tenants (router.store)"),
    Metric(
        "holdfast_store_max_bytes", G, (), "Size beyond which the oldest objects are deleted (router.store_max_bytes)"
    ),
    Metric(
        "holdfast_store_objects",
        G,
        ("kind",),
        "Stored objects: response, chat completion, conversation, file, batch; hidden: not complete yet",
    ),
    Metric(
        "holdfast_store_jobs",
        G,
        ("kind", "state"),
        "Background responses and lines of batches that are not over: waiting for a router, or running at one",
    ),
    Metric("holdfast_store_oldest_job_seconds", G, (), "Age of the oldest of these jobs; 0: there is none"),
    Metric("holdfast_store_failures_total", C, (), "Answers that this router could not store"),
)
GATEWAY_METRICS: Final = (
    Metric("vllm:num_requests_running", G, ("model_name",), "Sequences that run"),
    Metric("vllm:num_requests_waiting", G, ("model_name",), "Requests that wait, in this router and in its replicas"),
    Metric("vllm:kv_cache_usage_perc", G, ("model_name",), "Share of the KV blocks that are in use, from 0 to 1"),
    Metric(
        "vllm:cache_config_info", G, ("model_name", "block_size", "num_gpu_blocks"), "Always 1: blocks of one replica"
    ),
    Metric(
        "vllm:lora_requests_info",
        G,
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        "Always 1: requests of adapters are not counted apart",
    ),
)
PROCESS_METRICS: Final = (Metric("holdfast_build_info", G, ("version",), "Always 1: the version that runs"),)

SECTIONS: Final[Mapping[str, tuple[Metric, ...]]] = {
    "Requests": REQUEST_METRICS,
    "Failover": FAILOVER_METRICS,
    "Connections": CONNECTION_METRICS,
    "Overload": OVERLOAD_METRICS,
    "Replicas": REPLICA_METRICS,
    "Store": STORE_METRICS,
    "Gateways": GATEWAY_METRICS,
    "Process": PROCESS_METRICS,
}
METRICS: Final[Mapping[str, Metric]] = {one.name: one for section in SECTIONS.values() for one in section}
SERIES: Final = frozenset(series for one in METRICS.values() for series in one.series)
"""Every name that can be queried."""

"""Generator of the Grafana dashboard, `k8s/monitoring/dashboard.json`. `--check` only tells whether it is current.

    python -m scripts.grafana_dashboard [--check]

Every router tells of all replicas, so figures of replicas are the maximum over the routers, by replica; those of
requests are sums over routers.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from scripts.generated_file import keep

PAGE = Path(__file__).resolve().parent.parent / "k8s" / "monitoring" / "dashboard.json"
WIDTH, HEIGHT = 8, 8
COLUMNS = 24 // WIDTH
MODEL = '{model=~"$model"}'
WEIGHTS = "holdfast_model_weight_bytes"
QUANTILES = (0.5, 0.95, 0.99)


class Panel(NamedTuple):
    """One graph: its title, its unit, and its queries by what they are called."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def rate(name: str, by: str, selector: str = MODEL) -> str:
    """Of requests: over all routers."""
    return f"sum by ({by}) (rate({name}{selector}[$__rate_interval]))"


def of_replicas(name: str) -> str:
    return f"max by (model, replica) ({name}{MODEL})"


def rate_of_replicas(name: str, by: str = "model, replica") -> str:
    return f"max by ({by}) (rate({name}{MODEL}[$__rate_interval]))"


def share(part: str, whole: str) -> str:
    return f"{rate_of_replicas(part)} / {rate_of_replicas(whole)}"


def quantiles(title: str, name: str, by: str = "") -> Panel:
    """Of a histogram of requests; `by` is one more label to tell apart."""
    labels, said = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    queries = tuple(
        (f"p{100 * one:g}{said}", f"histogram_quantile({one}, {rate(f'{name}_bucket', labels)})")
        for one in ((0.95,) if by else QUANTILES)
    )
    return Panel(title, "s", queries)


NAME = "{{replica}}"
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Requests",
        (
            Panel("Requests by outcome", "reqps", (("{{outcome}}", rate("holdfast_requests_total", "outcome")),)),
            Panel(
                "Tokens",
                "short",
                (
                    ("prompt", f"sum(rate(holdfast_prompt_tokens_total{MODEL}[$__rate_interval]))"),
                    ("output", f"sum(rate(holdfast_output_tokens_total{MODEL}[$__rate_interval]))"),
                ),
            ),
            Panel(
                "Open and queued",
                "short",
                (
                    ("open", "sum(holdfast_requests_open)"),
                    ("queued {{class}}", f"sum by (class) (holdfast_requests_queued_by_class{MODEL})"),
                ),
            ),
            quantiles("Time to first token", "holdfast_time_to_first_token_seconds"),
            quantiles("Time per output token", "holdfast_time_per_output_token_seconds"),
            quantiles("Duration", "holdfast_request_duration_seconds"),
            quantiles("Queue time by class, p95", "holdfast_queue_time_seconds", "class"),
            quantiles("Output waiting for its reader", "holdfast_reader_wait_seconds"),
            Panel(
                "Slow requests and HTTP errors",
                "reqps",
                (
                    ("slow", rate("holdfast_slow_requests_total", "model")),
                    ("HTTP {{status}}", rate("holdfast_http_responses_total", "status", '{status=~"[45].."}')),
                ),
            ),
            Panel(
                "Connections cut off and calls reset",
                "reqps",
                (
                    ("{{protocol}}: {{reason}}", rate("holdfast_connections_cut_total", "protocol, reason", "")),
                    ("calls reset", "sum(rate(holdfast_calls_reset_total[$__rate_interval]))"),
                ),
            ),
        ),
    ),
    (
        "Failover",
        (
            Panel("Failovers by cause", "reqps", (("{{cause}}", rate("holdfast_failovers_total", "cause")),)),
            quantiles("Pauses that clients notice", "holdfast_pause_seconds"),
            Panel(
                "Replicas up and lost",
                "short",
                (
                    ("up {{model}}", f"max by (model) (holdfast_model_replicas{MODEL})"),
                    ("lost {{model}}", f"max by (model) (increase(holdfast_replicas_lost_total{MODEL}[5m]))"),
                ),
            ),
            Panel("Tokens replayed", "short", (("{{model}}", rate("holdfast_replayed_tokens_total", "model")),)),
            Panel(
                "Weights of a replica",
                "bytes",
                (
                    (
                        "{{model}}, {{quantization}}",
                        f"max by (model, quantization) ({WEIGHTS}{MODEL})",
                    ),
                ),
            ),
        ),
    ),
    (
        "Overload",
        (
            Panel(
                "Pressure",
                "percentunit",
                (("{{resource}}", "max by (resource) (holdfast_overload_pressure_ratio)"),),
            ),
            Panel(
                "Protective actions",
                "reqps",
                (
                    ("on: {{action}}", "max by (action) (holdfast_overload_action_active)"),
                    ("{{action}}", rate("holdfast_overload_actions_total", "action", "")),
                    ("over {{setting}}", rate("holdfast_byte_budget_refusals_total", "setting", "")),
                ),
            ),
            Panel("Bytes in flight", "bytes", (("all routers", "sum(holdfast_bytes_in_flight)"),)),
            Panel(
                "Suspended until read",
                "short",
                (
                    ("suspended", "sum(holdfast_requests_suspended)"),
                    ("suspensions {{model}}", rate("holdfast_suspensions_total", "model")),
                ),
            ),
        ),
    ),
    (
        "Replicas",
        (
            Panel(
                "Running and waiting",
                "short",
                (
                    (f"running {NAME}", of_replicas("holdfast_replica_requests_running")),
                    (f"waiting {NAME}", of_replicas("holdfast_replica_requests_waiting")),
                ),
            ),
            Panel("KV cache in use", "percentunit", ((NAME, of_replicas("holdfast_replica_kv_cache_usage_ratio")),)),
            Panel("Output tokens", "short", ((NAME, rate_of_replicas("holdfast_replica_output_tokens_total")),)),
            Panel(
                "Prefix cache hits",
                "percentunit",
                (
                    (
                        NAME,
                        share("holdfast_replica_prefix_hit_tokens_total", "holdfast_replica_prefix_query_tokens_total"),
                    ),
                ),
            ),
            Panel(
                "Drafts accepted",
                "percentunit",
                ((NAME, share("holdfast_replica_accepted_tokens_total", "holdfast_replica_draft_tokens_total")),),
            ),
            Panel(
                "Preemptions and evictions",
                "short",
                (
                    (f"preemptions {NAME}", rate_of_replicas("holdfast_replica_preemptions_total")),
                    (f"evictions {NAME}", rate_of_replicas("holdfast_replica_evictions_total")),
                ),
            ),
            Panel(
                "Tokens sent from replica to replica",
                "short",
                (
                    (
                        "{{sender}} to {{replica}}",
                        f"max by (sender, replica) (rate(holdfast_transferred_tokens_total{MODEL}[$__rate_interval]))",
                    ),
                ),
            ),
            Panel(
                "Step time, p95",
                "s",
                (
                    (
                        NAME,
                        "histogram_quantile(0.95, "
                        f"{rate_of_replicas('holdfast_replica_step_seconds_bucket', 'replica, le')})",
                    ),
                ),
            ),
            Panel(
                "Step time by phase",
                "percentunit",
                (
                    (
                        f"{{{{phase}}}} {NAME}",
                        rate_of_replicas("holdfast_replica_step_phase_seconds_total", "replica, phase"),
                    ),
                ),
            ),
            Panel(
                "GPU",
                "percentunit",
                (
                    (f"utilization {NAME}", of_replicas("holdfast_replica_gpu_utilization_ratio")),
                    (
                        f"memory {NAME}",
                        f"{of_replicas('holdfast_replica_gpu_memory_used_bytes')} / "
                        f"{of_replicas('holdfast_replica_gpu_memory_total_bytes')}",
                    ),
                ),
            ),
        ),
    ),
    (
        "Store",
        (
            Panel(
                "Stored",
                "bytes",
                (("stored", "max(holdfast_store_bytes)"), ("bound", "max(holdfast_store_max_bytes)")),
            ),
            Panel("Stored objects", "short", (("{{kind}}", "max by (kind) (holdfast_store_objects)"),)),
            Panel(
                "Background jobs",
                "short",
                (("{{kind}} {{state}}", "max by (kind, state) (holdfast_store_jobs)"),),
            ),
            Panel("Oldest background job", "s", (("age", "max(holdfast_store_oldest_job_seconds)"),)),
        ),
    ),
)
SOURCE = {"type": "prometheus", "uid": "${source}"}


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "collapsed": False})
        top += 1
        for number, panel in enumerate(row):
            panels.append(_graph(panel, len(panels) + 1, number, top))
        top += HEIGHT * -(-len(row) // COLUMNS)
    return {
        "title": "Holdfast",
        "uid": "holdfast",
        "tags": ["holdfast", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _graph(panel: Panel, identity: int, number: int, top: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(65 + index), "datasource": SOURCE, "legendFormat": said, "expr": query}
        for index, (said, query) in enumerate(panel.queries)
    ]
    place = {"x": WIDTH * (number % COLUMNS), "y": top + HEIGHT * (number // COLUMNS), "w": WIDTH, "h": HEIGHT}
    return {
        "id": identity,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def _variables() -> list[dict[str, Any]]:
    query = "label_values(holdfast_model_replicas, model)"
    model = {"name": "model", "label": "Model", "type": "query", "datasource": SOURCE, "query": query}
    return [
        {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"},
        model | {"multi": True, "includeAll": True, "allValue": ".*", "refresh": 2},
    ]


def main() -> None:
    keep(PAGE, json.dumps(dashboard(), indent=1) + "\n", "panels", "scripts.grafana_dashboard")


if __name__ == "__main__":
    main()

"""Every name that is published, documented, drawn or alerted by is one of the catalogue's, and is published."""

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from holdfast.router.metrics.catalogue import GATEWAY_METRICS, METRICS, REPLICA_METRICS, SERIES, MetricType
from holdfast.router.metrics.exposition import Sample, exposed, gateway_samples, process_samples, replica_samples
from holdfast.worker.request import EngineLoad
from holdfast.worker.step_update import NO_STEPS, TOKEN_TIMES_S, EngineStats, Histogram
from scripts import grafana_dashboard, metrics_docs

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "k8s" / "monitoring"
FUNCTIONS = {"sum", "by", "max", "min", "time", "rate", "increase", "histogram_quantile", "label_values", "and"}
LOAD = EngineLoad(num_running=3, num_waiting=1, num_waiting_tokens=70, num_free_blocks=6, num_total_blocks=10)
COUNTS = {item.name: 1 for item in fields(EngineStats) if item.default == 0}
STATS = EngineStats(**COUNTS, step_counts=(2, *NO_STEPS[1:]))


def unknown_names(query: str) -> set[str]:
    """Names in a query of PromQL that are neither metrics nor its own words."""
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]|\b(?:by|without) \([^)]*\)|\{[^}]*\}', " ", query)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - SERIES - FUNCTIONS - labels_of(query)


def labels_of(query: str) -> set[str]:
    """Of a variable: `label_values(metric, label)`."""
    return set(re.findall(r"label_values\([^,]+, (\w+)\)", query))


def unknown_labels(query: str) -> set[str]:
    """Labels in a query that none of its metrics has."""
    named = set(re.findall(r"[a-zA-Z_:][\w:]*", query)) & SERIES
    known = {"le"} | {label for one in METRICS.values() if set(one.series) & named for label in one.labels}
    lists = re.findall(r"\bby \(([^)]*)\)", query)
    selectors = re.findall(r"(\w+)=~?\"", query)
    used = {label.strip() for text in lists for label in text.split(",")} | set(selectors) | labels_of(query)
    return used - known


def queries() -> dict[str, str]:
    """Of the dashboard and the alerts, by where they stand."""
    board = json.loads((MONITORING / "dashboard.json").read_text())
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    graphs = {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", ())
    }
    variables = {one["name"]: one["query"] for one in board["templating"]["list"] if one["type"] == "query"}
    return graphs | variables | {rule["alert"]: rule["expr"] for group in rules for rule in group["rules"]}


def test_dashboard_and_alerts_ask_only_for_metrics_and_labels_that_exist():
    assert len(queries()) > 40
    for place, query in queries().items():
        assert not unknown_names(query), place
        assert not unknown_labels(query), place


@pytest.mark.parametrize(
    ("query", "names", "labels"),
    [
        ("rate(holdfast_request_total[5m])", {"holdfast_request_total"}, set()),
        ('sum by (replika) (rate(holdfast_requests_total{model="a"}[5m]))', set(), {"replika"}),
        ("histogram_quantile(0.9, rate(holdfast_pause_seconds[5m]))", {"holdfast_pause_seconds"}, set()),
    ],
)
def test_a_query_that_is_wrong_is_found(query, names, labels):
    assert unknown_names(query) == names
    assert unknown_labels(query) == labels


def test_nearly_every_figure_of_ours_is_drawn_or_alerted_by():
    """A gateway has its own eyes."""
    text = " ".join(queries().values())
    unseen = {
        one.name
        for one in METRICS.values()
        if not any(re.search(rf"\b{series}\b", text) for series in one.series) and one not in GATEWAY_METRICS
    }
    assert unseen == {
        "holdfast_build_info",
        "holdfast_requests_queued",
        "holdfast_replica_adapter_loads_total",
        "holdfast_replica_computed_tokens_total",
        "holdfast_replica_resident_adapters",
        "holdfast_replica_disk_backlog_bytes",
        "holdfast_replica_disk_blocks",
        "holdfast_replica_disk_bytes",
        "holdfast_replica_disk_hit_tokens_total",
        "holdfast_replica_disk_losses_total",
        "holdfast_replica_expired_total",
        "holdfast_replica_kv_blocks",
        "holdfast_model_state_bytes",
        "holdfast_replica_pinned_blocks",
        "holdfast_replica_recomputed_tokens_total",
        "holdfast_replica_snapshot_evictions_total",
        "holdfast_replica_snapshot_hits_total",
        "holdfast_replica_cut_transfers_total",
        "holdfast_replica_received_bytes_total",
        "holdfast_replica_received_tokens_total",
        "holdfast_replica_role",
        "holdfast_replica_sent_blocks_total",
        "holdfast_replica_sent_bytes_total",
        "holdfast_replica_state_slots",
        "holdfast_replica_steps_total",
        "holdfast_replica_waiting_tokens",
    }


def test_the_page_and_the_dashboard_are_current():
    page = metrics_docs.PAGE.read_text()
    assert metrics_docs.with_tables(page) == page
    assert json.loads(grafana_dashboard.PAGE.read_text()) == grafana_dashboard.dashboard()


def test_a_replica_tells_all_of_its_figures():
    heard = {sample.name: sample for sample in replica_samples("m", "r", LOAD, STATS)}
    assert heard.keys() == {one.name for one in REPLICA_METRICS}
    assert heard["holdfast_replica_kv_cache_usage_ratio"].value == pytest.approx(0.4)
    steps = heard["holdfast_replica_step_seconds"].value
    assert (steps.num_values, steps.total) == (2, 3)
    without = {sample.name for sample in replica_samples("m", "r", LOAD, replace(STATS, gpu_memory_total_bytes=0))}
    assert heard.keys() - without == {name for name in heard if "_gpu_" in name}


def test_gateways_find_the_names_that_they_ask_for():
    samples = [
        *gateway_samples(
            "m", num_running=3, num_waiting=2, num_free_blocks=6, num_total_blocks=10, block_size=16, num_blocks=10
        ),
        *process_samples("1"),
    ]
    heard = {sample.name: (sample.labels, sample.value) for sample in samples}
    assert {one.name for one in GATEWAY_METRICS} < heard.keys()
    assert heard["vllm:num_requests_waiting"] == (("m",), 2)
    assert heard["vllm:cache_config_info"] == (("m", "16", "10"), 1)
    lines = exposed(samples)[0].decode().splitlines()
    assert 'vllm:kv_cache_usage_perc{model_name="m"} 0.4' in lines


def test_a_histogram_counts_up_to_its_bounds_and_above():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.note(value)
    text = exposed([Sample("holdfast_pause_seconds", ("m",), histogram)])[0].decode()
    buckets = dict(re.findall(r'holdfast_pause_seconds_bucket\{le="([^"]+)",model="m"\} (\S+)', text))
    assert buckets == {"1.0": "2.0", "2.0": "3.0", "+Inf": "4.0"}
    assert 'holdfast_pause_seconds_sum{model="m"} 12.0' in text
    assert len(TOKEN_TIMES_S) + 1 == len(NO_STEPS)
    assert all(math.isfinite(bound) for bound in TOKEN_TIMES_S)


def test_a_name_that_is_not_catalogued_is_not_published():
    with pytest.raises(AssertionError, match="holdfast_new"):
        exposed([Sample("holdfast_new", (), 1)])


def test_names_follow_the_conventions():
    for one in METRICS.values():
        assert one.kind is not MetricType.COUNTER or one.name.endswith("_total"), one.name
        assert one.kind is MetricType.COUNTER or not one.name.endswith("_total"), one.name
        assert one.help[0].isupper(), one.name
        assert not one.help.endswith("."), one.name

"""Endpoint `/metrics`: the figures of one router and its replicas, in Prometheus' text format.

prometheus-client is imported when it is first asked for, and gets a registry of this router alone. What may not live
here: counting (`router/requests/request_stats.py`, `worker/stats.py`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.events import ReplicaLoad
from holdfast.router.requests.request_stats import Histogram, RequestStats

_OF_REPLICAS: Final = {
    "num_tokens_generated": ("replica_output_tokens", "tokens that a replica has drawn"),
    "num_preemptions": ("replica_preemptions", "sequences whose blocks were taken, to be computed again"),
    "num_prefix_query_tokens": ("replica_prefix_query_tokens", "tokens that were looked up in the prefix cache"),
    "num_prefix_hit_tokens": ("replica_prefix_hit_tokens", "those of them that were cached"),
    "num_draft_tokens": ("replica_draft_tokens", "guessed tokens that were verified"),
    "num_accepted_tokens": ("replica_accepted_tokens", "those of them that were accepted"),
}


class Metrics:
    """What is published of one router."""

    def __init__(self, stats: RequestStats, dispatch_host: DispatchHost) -> None:
        self._stats = stats
        self._dispatch_host = dispatch_host
        self.responses: Counter[tuple[str, int]] = Counter()
        """HTTP responses by path and status."""

    def text(self) -> tuple[bytes, str]:
        """The figures as they are now, and their content type."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self._families()))
        return generate_latest(registry), CONTENT_TYPE_LATEST

    def _families(self) -> Iterator[Any]:
        models, host = self._stats.models, self._dispatch_host
        yield _counter(
            "requests",
            "requests that have ended, through all doors, by how",
            ("model", "outcome"),
            {(name, outcome): count for name, one in models.items() for outcome, count in one.outcomes.items()},
        )
        responses = {(path, str(status)): count for (path, status), count in self.responses.items()}
        yield _counter("http_responses", "responses of the HTTP door", ("path", "status"), responses)
        yield _gauge("requests_open", "requests that are open in this router", (), {(): host.num_open})
        yield _gauge("requests_queued", "those of them that wait for a replica", (), {(): host.num_queued})
        yield _counter("requests_resent", "requests sent to a replica once more", (), {(): host.num_resent})
        by_model = {(name,): one for name, one in models.items() if name}
        tokens = {name: one.num_prompt_tokens for name, one in by_model.items()}
        yield _counter("prompt_tokens", "tokens of the prompts of ended requests", ("model",), tokens)
        tokens = {name: one.num_output_tokens for name, one in by_model.items()}
        yield _counter("output_tokens", "output tokens of ended requests", ("model",), tokens)
        for attribute, name, told in (
            ("first_token_s", "time_to_first_token_seconds", "from a request's admission to its first token"),
            ("output_token_s", "time_per_output_token_seconds", "between the output tokens of one request, its mean"),
            ("duration_s", "request_duration_seconds", "from a request's admission to its own end"),
        ):
            yield _histogram(name, told, {model: getattr(one, attribute) for model, one in by_model.items()})
        yield from self._of_replicas()

    def _of_replicas(self) -> Iterator[Any]:
        host = self._dispatch_host
        up = {(model.name,): model.num_replicas for model in host.models()}
        yield _gauge("model_replicas", "replicas of a model that are up", ("model",), up)
        loads = {(load.model, load.replica_id): load for load in host.loads()}
        labels = ("model", "replica")
        running = {key: one.load.num_running for key, one in loads.items()}
        yield _gauge("replica_requests_running", "sequences that a replica runs", labels, running)
        waiting = {key: one.load.num_waiting for key, one in loads.items()}
        yield _gauge("replica_requests_waiting", "sequences that wait in a replica", labels, waiting)
        used = {key: _kv_use(one) for key, one in loads.items()}
        yield _gauge("replica_kv_cache_usage_ratio", "share of a replica's blocks that are in use", labels, used)
        for field, (name, told) in _OF_REPLICAS.items():
            values = {key: getattr(one.stats, field) for key, one in loads.items() if one.stats is not None}
            yield _counter(name, told, labels, values)


class _Collector:
    """What a registry asks."""

    def __init__(self, families: Iterable[Any]) -> None:
        self._families = families

    def collect(self) -> Iterable[Any]:
        return self._families


def _kv_use(load: ReplicaLoad) -> float:
    return 1 - load.load.num_free_blocks / max(1, load.load.num_total_blocks)


def _counter(name: str, told: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Any:
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(f"holdfast_{name}", told, labels=labels), values)


def _gauge(name: str, told: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(f"holdfast_{name}", told, labels=labels), values)


def _filled(family: Any, values: Mapping[Any, float]) -> Any:
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histogram(name: str, told: str, values: Mapping[Any, Histogram]) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(f"holdfast_{name}", told, labels=("model",))
    for key, histogram in values.items():
        so_far, buckets = 0, []
        for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        family.add_metric(key, buckets, histogram.total)
    return family

"""Exposition of samples in Prometheus' text format, by the catalogue.

prometheus-client is imported when it is first asked for. What may not live here: where samples come from.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from holdfast.router.metrics.catalogue import METRICS, Kind, Metric
from holdfast.worker.histogram import Histogram


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
    """What a registry asks."""

    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        return self._families


def _families(samples: Iterable[Sample]) -> Iterator[Any]:
    """In the catalogue's order; those without a sample are left out."""
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

    made = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily, Kind.HISTOGRAM: HistogramMetricFamily}
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

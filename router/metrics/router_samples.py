"""Samples of one router: its requests, its failovers, and the replicas that it sees.

What may not live here: counting (`router/requests/request_stats.py`, `router/dispatch/dispatch_stats.py`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Protocol

from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.dispatch.dispatch_stats import DispatchStats
from holdfast.router.metrics.exposition import Sample
from holdfast.router.metrics.replica_samples import gateway_samples, process_samples, replica_samples
from holdfast.router.overload.overload import Overload, OverloadAction
from holdfast.router.requests.poison_watch import PoisonWatch
from holdfast.router.requests.request_stats import ModelStats, RequestStats
from holdfast.worker.request import Priority
from holdfast.worker.security.certificates import Certificates


class ConnectionCounts(Protocol):
    """What is counted of clients' connections."""

    @property
    def num_cut(self) -> Mapping[tuple[str, str], int]:
        """Those that were closed, by protocol and reason."""

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
    """As they are now. `responses` are those of the HTTP door, by path and status; the `watch` is the router's."""
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
    for status in host.dispatch.models():
        model, mine = status.name, [one.load for one in loads if one.model == status.name]
        yield Sample("holdfast_model_replicas", (model,), status.num_replicas)
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

"""Demand for a model, as routers see it: waiting requests, their waiting time, and the load of its replicas. The input
of an autoscaler.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDemand:
    """One replica that is up and takes requests, as it last reported to a router."""

    replica_id: str
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    """Tokens not yet computed for its waiting and running sequences."""
    kv_use: float
    """Share of its KV blocks that sequences hold; cached ones do not count. 0 to 1."""
    num_prefill_tokens: int = 0
    """Prompt tokens that it has computed since its start."""
    prefill_tokens_per_s: float = 0.0
    """Measured prefill speed; 0: not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDemand:
    """The requests of one model, and its replicas."""

    model: str
    num_open: int = 0
    """Requests that have not ended."""
    num_queued: int = 0
    """Requests that wait in routers."""
    num_queued_tokens: int = 0
    """Prompt and output tokens of the queued requests, which their next replica has to compute."""
    longest_wait_s: float = 0.0
    """The longest that an open request has been here without its first token."""
    num_arrived: int = 0
    """Requests since the routers' starts, but for `num_left`. A request resumed from another router does not count."""
    num_left: int = 0
    """Requests since the routers' starts whose clients have left before the first token."""
    num_first_tokens: int = 0
    """Requests that have had their first token, since the routers' starts."""
    ttft_s: float = 0.0
    """The time to the first token that nine of ten recent requests kept to; 0 without any."""
    replicas: tuple[ReplicaDemand, ...] = ()


def merged(model: str, demands: Iterable[ModelDemand]) -> ModelDemand:
    """The demand that several routers see together. Every replica tells all routers the same of itself."""
    total, replicas = ModelDemand(model=model), dict[str, ReplicaDemand]()
    for one in demands:
        replicas |= {replica.replica_id: replica for replica in one.replicas}
        total = replace(
            total,
            num_open=total.num_open + one.num_open,
            num_queued=total.num_queued + one.num_queued,
            num_queued_tokens=total.num_queued_tokens + one.num_queued_tokens,
            longest_wait_s=max(total.longest_wait_s, one.longest_wait_s),
            num_arrived=total.num_arrived + one.num_arrived,
            num_left=total.num_left + one.num_left,
            num_first_tokens=total.num_first_tokens + one.num_first_tokens,
            ttft_s=max(total.ttft_s, one.ttft_s),
        )
    return replace(total, replicas=tuple(replicas.values()))


def with_counts_of(demand: ModelDemand, counted: ModelDemand | None) -> ModelDemand:
    """The demand with the counts of another one; None: with none yet."""
    counted = counted or ModelDemand(model=demand.model)
    return replace(
        demand,
        num_arrived=counted.num_arrived,
        num_left=counted.num_left,
        num_first_tokens=counted.num_first_tokens,
    )


def with_counts_since(total: ModelDemand, before: ModelDemand, now: ModelDemand) -> ModelDemand:
    """`total` plus the difference between two of one router's demands. A router whose counts have fallen has
    restarted.
    """
    if now.num_arrived + now.num_left < before.num_arrived + before.num_left:
        before = ModelDemand(model=now.model)
    return replace(
        total,
        num_arrived=total.num_arrived + now.num_arrived - before.num_arrived,
        num_left=total.num_left + now.num_left - before.num_left,
        num_first_tokens=total.num_first_tokens + now.num_first_tokens - before.num_first_tokens,
    )

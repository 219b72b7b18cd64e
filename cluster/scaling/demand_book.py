"""Demand book: which models are scaled by their load, and each router's last report on them. A core.

Time is passed in, in seconds of any one clock.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import Field, model_validator

from holdfast.router.demand import ModelDemand, merged, with_counts_of, with_counts_since
from holdfast.worker.settings import Settings

FRESH_S: Final = 5.0
"""Seconds for which a router's report counts; one comes every second or so."""

FOLLOWED_S: Final = 30.0
"""Seconds without a question about a model after which it is no longer scaled."""

PINNED_S: Final = 3600.0
"""A number that an update has set holds for so long at most, should the update have been killed."""

Followed = tuple[tuple[str, float | None], ...]
"""Names of models, in order, and how long requests wait for one at rest; None: it is never at rest."""


class DemandBook:
    """Kept by the directory, which every router and every autoscaler reaches."""

    def __init__(self) -> None:
        self._followed: dict[str, tuple[float | None, float]] = {}
        self._reports: dict[str, tuple[float, Sequence[ModelDemand]]] = {}
        self._pinned: dict[str, tuple[int, float]] = {}
        self._counted: dict[str, ModelDemand] = {}
        """Counts by model since the book knows its routers. A router that comes, goes or falls silent does not change
        these counts: its whole past would look like a burst."""

    def follow(self, model: str, cold_start_wait_s: float | None, now_s: float) -> bool:
        """Notes that an autoscaler follows a model. Returns whether routers must be informed."""
        before = self._followed.get(model)
        self._followed[model] = cold_start_wait_s, now_s
        return before is None or before[0] != cold_start_wait_s

    def note(self, router_id: str, demands: Sequence[ModelDemand], now_s: float) -> None:
        """Notes a router's current demand for all models that are followed."""
        _, before = self._reports.get(router_id, (now_s, ()))
        earlier = {one.model: one for one in before}
        for one in demands:
            if one.model in earlier:
                counted = self._counted.get(one.model, ModelDemand(model=one.model))
                self._counted[one.model] = with_counts_since(counted, earlier[one.model], one)
        self._reports[router_id] = now_s, demands

    def demand(self, model: str, now_s: float) -> ModelDemand | None:
        """Demand of all routers for a model; None if none has reported it lately. Counts start when the book first knew
        its routers.
        """
        fresh = [demands for reported_s, demands in self._reports.values() if now_s - reported_s <= FRESH_S]
        found = [one for demands in fresh for one in demands if one.model == model]
        return with_counts_of(merged(model, found), self._counted.get(model)) if found else None

    def pin(self, application: str, num_replicas: int | None, now_s: float) -> None:
        """An update sets the number of an application's replicas, whatever the load; None: the load decides again."""
        if num_replicas is None:
            self._pinned.pop(application, None)
        else:
            self._pinned[application] = num_replicas, now_s

    def pinned(self, now_s: float) -> Mapping[str, int]:
        """Fixed numbers of replicas, by application."""
        return {name: number for name, (number, set_s) in self._pinned.items() if now_s - set_s <= PINNED_S}

    def expire(self, now_s: float) -> bool:
        """Drops expired entries. Returns whether routers must be informed."""
        self._reports = {name: report for name, report in self._reports.items() if now_s - report[0] <= FRESH_S}
        kept = {model: one for model, one in self._followed.items() if now_s - one[1] <= FOLLOWED_S}
        has_changed = kept.keys() != self._followed.keys()
        self._followed = kept
        self._counted = {model: counted for model, counted in self._counted.items() if model in kept}
        return has_changed

    @property
    def followed(self) -> Followed:
        """The models that are scaled by their load."""
        return tuple((model, self._followed[model][0]) for model in sorted(self._followed))


class Rate:
    """Counts a second over the last `window_s`. A count that falls, after a restart, begins anew."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._counts = deque[tuple[float, float]]()

    def note(self, now_s: float, count: float) -> None:
        """Takes the count at a time in seconds."""
        if self._counts and count < self._counts[-1][1]:
            self._counts.clear()
        self._counts.append((now_s, count))
        while len(self._counts) > 2 and self._counts[1][0] <= now_s - self._window_s:
            self._counts.popleft()

    @property
    def per_s(self) -> float:
        """0 before there are two counts."""
        if len(self._counts) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._counts[0], self._counts[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


class Level:
    """Values of a figure over the last `keep_s`."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._values = deque[tuple[float, float]]()

    def note(self, now_s: float, value: float) -> None:
        """Adds a value and drops those older than the window."""
        self._values.append((now_s, value))
        while self._values[0][0] < now_s - self._keep_s:
            self._values.popleft()

    def mean(self, from_s: float, to_s: float) -> float | None:
        """Mean of the values between two times; None if there are none."""
        inside = [value for time_s, value in self._values if from_s <= time_s <= to_s]
        return sum(inside) / len(inside) if inside else None

    def greatest(self, from_s: float) -> float:
        """Since a time; 0 where there are none."""
        return max((value for time_s, value in self._values if time_s >= from_s), default=0.0)

    def growth_per_s(self, now_s: float, span_s: float) -> float:
        """Growth per second of the mean over `span_s`, against the span before it; 0 if unknown."""
        late, early = self.mean(now_s - span_s, now_s), self.mean(now_s - 2 * span_s, now_s - span_s)
        return 0.0 if late is None or early is None else (late - early) / span_s


class ScalingConfig(Settings):
    """Autoscaling of a model's replicas between two bounds. Without `max_replicas` the number is `cluster.replicas`."""

    max_replicas: int | None = Field(
        None, ge=1, description="maximum replicas of a model; unset: no autoscaling, always `replicas`"
    )
    min_replicas: int = Field(
        1,
        ge=0,
        description="minimum replicas of a model; 0: an idle model has no replica, and a new request waits for a start",
    )
    target_ttft_s: float = Field(
        2.0, gt=0, description="target of the 90th percentile of the time to the first token in seconds"
    )
    target_use: float = Field(
        0.7, gt=0, le=1, description="target utilization of a replica's sequences, KV blocks and prefill time"
    )
    startup_s: float = Field(
        10.0,
        gt=0,
        description="expected seconds from the start of a replica until it serves, until a start was measured",
    )
    downscale_after_s: float = Field(
        120.0, ge=0, description="seconds for which fewer replicas must have sufficed before one is removed"
    )
    zero_after_s: float = Field(
        600.0,
        ge=0,
        description="seconds without a request after which the last replica is removed, if min_replicas is 0",
    )
    cold_start_wait_s: float = Field(
        120.0, gt=0, description="seconds that requests wait for the first replica of a model scaled to zero"
    )

    @property
    def is_on(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max_replicas is not None

    @property
    def sleeps(self) -> bool:
        """Whether an idle model has no replica."""
        return self.is_on and self.min_replicas == 0

    @model_validator(mode="after")
    def _check_limits(self) -> "ScalingConfig":
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas = {self.max_replicas} must be at least min_replicas = {self.min_replicas}")
        return self

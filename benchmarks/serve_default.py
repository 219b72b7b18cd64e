"""Ray Serve's default autoscaling policy as a core of its own, to compare with in the simulator.

Source: `ray/serve/autoscaling_policy.py` of Ray 2.60 (`replica_queue_length_autoscaling_policy`, its factors and its
delays); a test holds it to that.
"""

import math
from dataclasses import dataclass
from typing import Final

from holdfast.cluster.scaling.autoscaler import Decision, Seen
from holdfast.cluster.scaling.demand_book import Level

_EPSILON_S: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """`AutoscalingConfig`, with Serve's defaults."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 2.0
    look_back_period_s: float = 30.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    downscale_to_zero_delay_s: float | None = None
    upscaling_factor: float = 1.0
    downscaling_factor: float = 1.0


class ServeDefault:
    """Decides for one deployment."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._ongoing = Level(settings.look_back_period_s)
        self._direction = 0
        self._since_s: float | None = None

    def decide(self, seen: Seen) -> Decision:
        """Requests count wherever they are, running or queued, as the mean over the look-back period."""
        assert seen.demand is not None
        self._ongoing.note(seen.now_s, seen.demand.num_open)
        ongoing = self._ongoing.mean(seen.now_s - self._settings.look_back_period_s, seen.now_s) or 0.0
        num_replicas = self.target(ongoing, len(seen.demand.replicas), seen.num_wanted, seen.now_s)
        least, most = self._settings.min_replicas, self._settings.max_replicas
        return Decision(num_replicas=min(max(num_replicas, least), most), reason=f"{ongoing:.1f} requests")

    def target(self, ongoing: float, num_running: int, num_wanted: int, now_s: float) -> int:
        """Serve's decision for a mean number of requests, before its limits."""
        settings = self._settings
        if num_running == 0 and ongoing > 0:  # at once
            return max(math.ceil(settings.upscaling_factor), num_wanted)
        if num_running == 0:
            return num_wanted if num_wanted else self._delayed(0, 0, now_s)
        desired = ongoing / settings.target_ongoing_requests
        return self._delayed(max(0, self._scaled(desired, num_running)), num_wanted, now_s)

    def _scaled(self, desired: float, num_running: int) -> int:
        change = desired - num_running
        factor = self._settings.upscaling_factor if change > 0 else self._settings.downscaling_factor
        scaled = math.ceil(num_running + factor * change)
        return scaled - 1 if math.ceil(desired) < num_running and scaled == num_running else scaled

    def _delayed(self, desired: int, num_wanted: int, now_s: float) -> int:
        """A change of direction, and no wish for a change, begin the delay anew."""
        settings = self._settings
        direction = (desired > num_wanted) - (desired < num_wanted)
        if direction == 0 or direction != self._direction:
            self._since_s = None
        self._direction = direction
        if direction == 0:
            return num_wanted
        delay_s = settings.upscale_delay_s
        if direction < 0:
            delay_s = settings.downscale_delay_s
            if num_wanted == 1 and settings.downscale_to_zero_delay_s is not None:
                delay_s = settings.downscale_to_zero_delay_s
            desired = desired if num_wanted == 1 else max(1, desired)
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s + _EPSILON_S < delay_s:
            return num_wanted
        self._direction, self._since_s = 0, None
        return desired

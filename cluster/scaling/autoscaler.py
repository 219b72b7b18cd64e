"""Autoscaler core: the number of replicas that a model should have, from the load that routers report. One per model.

No Ray, no clock, no IO: `decide` takes the observations and the time. It goes up for the load expected when a new
replica would serve, for a queue that would break the target of the first token, and for first tokens that are late; and
down once fewer replicas have been enough for a while.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from holdfast.cluster.scaling.demand_book import Level, Rate, ScalingConfig
from holdfast.router.demand import ModelDemand

RATE_WINDOW_S: Final = 10.0
"""Over which served requests and prefill tokens are counted."""

ARRIVAL_WINDOW_S: Final = 30.0
"""Arrivals come in bursts: over a short window one burst would look like a flood that lasts."""

STEADY_S: Final = 5.0
"""A load counts by its mean over so long, not by one moment."""

QUEUE_SHARE: Final = 0.5
"""Share of the target of the first token that waiting in queues may take: the rest is for computing the prompt."""

SPARE: Final = 0.1
"""Fewer replicas are enough if they would have this much of one left, beyond the target of their use."""

CHANCE: Final = 0.5
"""Replicas by which the load of two spells may differ by chance: so much growth is no trend."""

MAX_GROWTH: Final = 0.5
"""A trend adds at most this share of the load: over a few seconds, a trend may be chance."""

PATIENCE: Final = 4
"""Factor on the usual start time after which a starting replica is not counted."""

STARTUP_SMOOTHING: Final = 0.3  # weight of the newest start in the moving average
SPEED_LOSS_PER_S: Final = 0.002
"""Rate at which the best observed speed of a replica is forgotten, because requests change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A model at one moment."""

    now_s: float
    num_wanted: int
    """Number of replicas decided last, serving and starting."""
    demand: ModelDemand | None
    """None: no router has reported it lately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Number of replicas to run, and the reason in words."""

    num_replicas: int
    reason: str


class Autoscaler:
    """Decides for one model, about once a second."""

    def __init__(self, settings: ScalingConfig, max_num_seqs: int) -> None:
        """`max_num_seqs` is the number of sequences that a replica runs at once."""
        assert settings.max_replicas is not None, "the number of replicas follows the load"
        self._settings = settings
        self._max_replicas = settings.max_replicas
        self._max_num_seqs = max_num_seqs
        self._startup_s = settings.startup_s
        keep_s = max(settings.downscale_after_s, 4 * settings.startup_s, 60.0)
        self._need = Level(keep_s)
        """Replicas that the running load needs."""
        self._arrivals = Rate(ARRIVAL_WINDOW_S)
        self._left = Rate(ARRIVAL_WINDOW_S)
        self._served = Rate(RATE_WINDOW_S)
        self._prefills: dict[str, Rate] = {}
        self._best_per_s = 0.0
        """Requests a second that one replica has served at best, of late."""
        self._ordered = deque[float]()
        """Times at which the replicas that do not serve yet were requested."""
        self._asked_s = -math.inf
        self._num_serving = 0
        self._busy_s: float | None = None
        self._last_s: float | None = None

    @property
    def startup_s(self) -> float:
        """Seconds that a replica takes to serve, as measured."""
        return self._startup_s

    def decide(self, seen: Seen) -> Decision:
        """The number of replicas from now on, within the limits."""
        decision = self._decided(seen)
        least, most = self._settings.min_replicas, self._max_replicas
        num_replicas = min(max(decision.num_replicas, least), most)
        if num_replicas > seen.num_wanted:
            self._asked_s = seen.now_s
            self._ordered.extend([seen.now_s] * (num_replicas - seen.num_wanted))
        elif num_replicas < seen.num_wanted:
            self._ordered.clear()
        return Decision(num_replicas=num_replicas, reason=decision.reason)

    def _decided(self, seen: Seen) -> Decision:
        if seen.demand is None:
            return Decision(num_replicas=seen.num_wanted, reason="no router has reported on it")
        self._note(seen, seen.demand)
        if seen.demand.num_open == 0 and self._may_sleep(seen):
            return Decision(num_replicas=0, reason=f"idle for {self._settings.zero_after_s:g} s")
        if seen.num_wanted == 0 or not seen.demand.replicas:
            return self._from_zero(seen, seen.demand)
        more = max(
            self._for_load(seen), self._for_queue(seen, seen.demand), self._for_late(seen, seen.demand), key=_number
        )
        return more if more.num_replicas > seen.num_wanted else self._fewer(seen, seen.demand)

    # --- observations ---

    def _note(self, seen: Seen, demand: ModelDemand) -> None:
        now_s = seen.now_s
        if demand.num_open or self._busy_s is None:
            self._busy_s = now_s
        self._arrivals.note(now_s, demand.num_arrived + demand.num_left)
        self._left.note(now_s, demand.num_left)
        self._served.note(now_s, demand.num_first_tokens)
        num_serving = len(demand.replicas)
        for _ in range(num_serving - self._num_serving):
            if self._ordered:
                self._startup_s += STARTUP_SMOOTHING * (now_s - self._ordered.popleft() - self._startup_s)
        self._num_serving = num_serving
        self._need.note(now_s, self._replicas_in_use(now_s, demand) / self._settings.target_use)
        passed_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._best_per_s *= max(0.0, 1 - SPEED_LOSS_PER_S * passed_s)
        if num_serving:
            self._best_per_s = max(self._best_per_s, self._served.per_s / num_serving)
        self._last_s = now_s

    def _replicas_in_use(self, now_s: float, demand: ModelDemand) -> float:
        """The load in whole replicas, by whichever is scarcest: sequences, KV blocks or time for prompts."""
        sequences = sum(one.num_running for one in demand.replicas) / self._max_num_seqs
        blocks = sum(one.kv_use for one in demand.replicas)
        return max(sequences, blocks, self._prefill_time(now_s, demand))

    def _prefill_time(self, now_s: float, demand: ModelDemand) -> float:
        """Seconds of prefill in each second, of all replicas."""
        self._prefills = {
            one.replica_id: self._prefills.get(one.replica_id) or Rate(RATE_WINDOW_S) for one in demand.replicas
        }
        total = 0.0
        for one in demand.replicas:
            rate = self._prefills[one.replica_id]
            rate.note(now_s, one.num_prefill_tokens)
            if one.prefill_tokens_per_s > 0:
                total += rate.per_s / one.prefill_tokens_per_s
        return total

    def _may_sleep(self, seen: Seen) -> bool:
        assert self._busy_s is not None
        return self._settings.min_replicas == 0 and seen.now_s - self._busy_s >= self._settings.zero_after_s

    # --- more ---

    def _from_zero(self, seen: Seen, demand: ModelDemand) -> Decision:
        if demand.num_open and seen.num_wanted == 0:
            return Decision(num_replicas=1, reason=f"{demand.num_open} requests wait for the first replica")
        return Decision(num_replicas=seen.num_wanted, reason="none serves yet" if seen.num_wanted else "asleep")

    def _for_load(self, seen: Seen) -> Decision:
        """Replicas for the load expected when a replica requested now begins to serve."""
        need = self._need.mean(seen.now_s - STEADY_S, seen.now_s) or 0.0
        growth = self._startup_s * self._need.growth_per_s(seen.now_s, max(STEADY_S, self._startup_s))
        expected = need + min(max(growth - CHANCE, 0.0), MAX_GROWTH * need)
        reason = f"load of {need:.1f} replicas at the target of their use, {expected:.1f} after a start"
        return Decision(num_replicas=math.ceil(expected), reason=reason)

    def _for_queue(self, seen: Seen, demand: ModelDemand) -> Decision:
        """Replicas for a queue that takes too much of the target: enough that it is gone one start after they serve."""
        wait_s, per_s = self.queue_s(demand), self._best_per_s
        if wait_s <= QUEUE_SHARE * self._settings.target_ttft_s or not per_s:
            return Decision(num_replicas=0, reason="the queue is short")
        arrivals_per_s = max(self._arrivals.per_s - self._left.per_s, self._served.per_s)
        queued = _num_waiting(demand)
        then = queued + (arrivals_per_s - per_s * seen.num_wanted) * self._startup_s
        wanted = (arrivals_per_s + max(0.0, then) / self._startup_s) / per_s
        reason = f"{queued} requests wait, the last of them for about {wait_s:.1f} s"
        return Decision(num_replicas=math.ceil(wanted) if then > 0 else 0, reason=reason)

    def _for_late(self, seen: Seen, demand: ModelDemand) -> Decision:
        """One more where first tokens are late and requests wait, whatever the estimates say."""
        ttft_s = max(demand.ttft_s, demand.longest_wait_s)
        is_late = ttft_s > self._settings.target_ttft_s and _num_waiting(demand) > 0
        if not is_late or seen.num_wanted > len(demand.replicas):
            return Decision(num_replicas=0, reason="first tokens are in time")
        return Decision(num_replicas=seen.num_wanted + 1, reason=f"first tokens take {ttft_s:.1f} s")

    def queue_s(self, demand: ModelDemand) -> float:
        """Seconds until all waiting requests have had their first token, with the replicas that serve: by requests and
        by tokens.
        """
        speed = sum(one.prefill_tokens_per_s for one in demand.replicas)
        waiting_tokens = demand.num_queued_tokens + sum(one.num_waiting_tokens for one in demand.replicas)
        by_tokens = waiting_tokens / speed if speed else 0.0
        per_s = self._best_per_s * len(demand.replicas)
        by_requests = _num_waiting(demand) / per_s if per_s else 0.0
        return max(by_tokens, by_requests)

    # --- fewer ---

    def _fewer(self, seen: Seen, demand: ModelDemand) -> Decision:
        """Once the greatest load of the last while would leave something of fewer replicas unused."""
        stay = Decision(num_replicas=seen.num_wanted, reason="enough")
        after_s = self._settings.downscale_after_s
        is_calm = self.queue_s(demand) <= QUEUE_SHARE * self._settings.target_ttft_s
        is_young = self._need.mean(-math.inf, seen.now_s - 0.9 * after_s) is None
        if not is_calm or is_young or self._is_starting(seen, demand):
            return stay
        greatest = self._need.greatest(seen.now_s - after_s)
        enough = max(1, math.ceil(greatest + SPARE))
        if enough >= seen.num_wanted:
            return stay
        return Decision(num_replicas=enough, reason=f"at most {greatest:.1f} replicas were needed for {after_s:g} s")

    def _is_starting(self, seen: Seen, demand: ModelDemand) -> bool:
        """A start under way is not taken back, unless it has taken so long that it may never come."""
        is_recent = seen.now_s - self._asked_s < PATIENCE * self._startup_s
        return len(demand.replicas) < seen.num_wanted and is_recent


def _number(decision: Decision) -> int:
    return decision.num_replicas


def _num_waiting(demand: ModelDemand) -> int:
    return demand.num_queued + sum(one.num_waiting for one in demand.replicas)

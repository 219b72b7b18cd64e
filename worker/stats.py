"""Statistics of a replica: counts since its start and what it holds now, for people, benchmarks and metrics."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

TIMES_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_TIMES_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Of single tokens and of single steps."""


class Histogram:
    """Counts of values up to each bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(
        self, bounds: Sequence[float] = TIMES_S, counts: Sequence[int] | None = None, total: float = 0.0
    ) -> None:
        """`counts` and `total`: what was counted elsewhere, by the same bounds."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1) if counts is None else list(counts)
        """By bound, and of all that are above; not cumulative."""
        assert len(self.counts) == len(bounds) + 1, f"{len(self.counts)} counts for {len(bounds)} bounds"
        self.total = total

    def note(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def num_values(self) -> int:
        return sum(self.counts)


NO_STEPS: Final = (0,) * (len(TOKEN_TIMES_S) + 1)


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counts since the start, and what the engine holds now: one flat set of figures.

    The scheduler and the engine count in one record, in place. What `Scheduler.stats` returns is a copy of it, with the
    levels of now; nobody changes that copy.
    """

    num_requests: int = 0
    """All that were submitted, refused ones among them."""
    num_steps: int = 0
    num_tokens_computed: int = 0
    num_tokens_recomputed: int = 0
    """Those of `num_tokens_computed` that had been computed before and were lost by a preemption."""
    num_tokens_generated: int = 0
    num_prefix_query_tokens: int = 0
    """Tokens of all requests as they were when first admitted, other than by forking."""
    num_prefix_hit_tokens: int = 0
    """Those of `num_prefix_query_tokens` that were in the prefix cache."""
    num_forked_tokens: int = 0
    """Tokens that sequences took over from a running one of their group, other than through the prefix cache."""
    num_draft_tokens: int = 0
    """Guessed tokens that were verified."""
    num_accepted_tokens: int = 0
    """Those of `num_draft_tokens` that were accepted; their ratio is the acceptance rate."""
    num_preemptions: int = 0
    num_evictions: int = 0
    """Cached blocks that were handed out for other tokens."""
    num_finished: int = 0
    """Requests that came to their own end."""
    num_aborted: int = 0
    num_expired: int = 0
    """Requests that were dropped because their time was up, or would have been before their first token."""
    step_time_s: float = 0.0
    """Seconds spent in `runner.run`, all steps together."""
    plan_time_s: float = 0.0
    """Seconds spent in planning, all steps together."""
    commit_time_s: float = 0.0
    """Seconds spent in taking results in and in telling listeners, all steps together."""
    step_counts: Sequence[int] = NO_STEPS
    """Steps by how long planning, running and committing took together; up to each of `TOKEN_TIMES_S`, and above."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    """Tokens that alive requests still have to have computed before each draws its next one."""
    num_used_blocks: int = 0
    num_free_blocks: int = 0
    """Blocks that can be handed out, cached ones among them: used and free ones are all."""
    num_cached_blocks: int = 0
    """Those of `num_free_blocks` that still hold a prefix."""
    num_total_blocks: int = 0
    num_wasted_slots: int = 0
    """Slots of the used blocks that are kept for no token that exists: with continuous batching, less than a block
    for each sequence; with static batching also what is reserved for the future, and all of a sequence that ended."""
    prefill_tokens_per_s: float = 0.0
    """The best of the last steps that computed prompts for the most part; 0 before there were some."""
    gpu_utilization: float = 0.0
    """Share of the last moments in which the leading rank's GPU computed, from 0 to 1; 0 without a GPU."""
    gpu_memory_used_bytes: int = 0
    """Of the leading rank's GPU, other programs' use included."""
    gpu_memory_total_bytes: int = 0
    """Of the leading rank's GPU; 0: there is none."""

    def note_gpu(self, gpu: "GpuStats") -> None:
        """Takes in a GPU as it was measured."""
        self.gpu_utilization = gpu.utilization
        self.gpu_memory_used_bytes = gpu.memory_used_bytes
        self.gpu_memory_total_bytes = gpu.memory_total_bytes

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompts' tokens that were cached; 0 before the first."""
        return self.num_prefix_hit_tokens / max(1, self.num_prefix_query_tokens)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens in a second of stepping; idle time does not count. 0 before the first step."""
        return self.num_tokens_generated / self.step_time_s if self.step_time_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStats:
    """A GPU as it is now."""

    utilization: float = 0.0
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0

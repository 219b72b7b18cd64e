"""Reports of a replica: updates of its steps, as links carry them and routers take them in, and its statistics."""

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from holdfast.worker.errors import HoldfastError
from holdfast.worker.model_info import ReplicaFacts
from holdfast.worker.request import EngineLoad, TokenDelta

TIMES_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_TIMES_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Bounds in seconds for single tokens and single steps."""


class Histogram:
    """Counts of values up to each bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(
        self, bounds: Sequence[float] = TIMES_S, counts: Sequence[int] | None = None, total: float = 0.0
    ) -> None:
        """`counts` and `total`: counts from elsewhere, by the same bounds."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1) if counts is None else list(counts)
        """Counts by bound, and above all bounds; not cumulative."""
        assert len(self.counts) == len(bounds) + 1, f"{len(self.counts)} counts for {len(bounds)} bounds"
        self.total = total

    def note(self, value: float) -> None:
        """Counts one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def num_values(self) -> int:
        return sum(self.counts)


NO_STEPS: Final = (0,) * (len(TOKEN_TIMES_S) + 1)


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counts since the start, and the engine's current state: one flat set of figures.

    The scheduler and the engine count in one record, in place. What `Scheduler.stats` returns is a copy of it, with the
    levels of now; that copy is never changed.
    """

    num_requests: int = 0
    """All that were submitted, refused ones among them."""
    num_steps: int = 0
    num_tokens_computed: int = 0
    num_tokens_recomputed: int = 0
    """Tokens among `num_tokens_computed` that had been computed before and were lost by a preemption."""
    num_tokens_generated: int = 0
    num_prefix_query_tokens: int = 0
    """Tokens of all requests as they were when first admitted, other than by forking."""
    num_prefix_hit_tokens: int = 0
    """Tokens among `num_prefix_query_tokens` that were in the prefix cache."""
    num_forked_tokens: int = 0
    """Tokens that sequences took over from a running one of their group, other than through the prefix cache."""
    num_draft_tokens: int = 0
    """Guessed tokens that were verified."""
    num_accepted_tokens: int = 0
    """Tokens among `num_draft_tokens` that were accepted; their ratio is the acceptance rate."""
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
    """Blocks among `num_free_blocks` that still hold a prefix."""
    num_pinned_blocks: int = 0
    """Blocks of prefixes that requests have asked to keep, in use or free, as of the last plan."""
    num_total_blocks: int = 0
    num_wasted_slots: int = 0
    """Slots of the used blocks without a token: with continuous batching, less than a block for each sequence; with
    static batching also reserved slots, and all slots of an ended sequence.
    """
    num_snapshot_hits: int = 0
    """Requests that began, when first admitted, from a state that was kept."""
    num_snapshot_evictions: int = 0
    """Kept states whose slots were handed out for other sequences."""
    num_used_slots: int = 0
    """Slots with the state of a sequence that runs; of a model that keeps states."""
    num_cached_slots: int = 0
    """Slots with a kept state that belongs to no running sequence."""
    num_total_slots: int = 0
    num_disk_hit_tokens: int = 0
    """Tokens among `num_prefix_hit_tokens`, or of a preempted request, whose blocks were brought back from the disk."""
    num_disk_losses: int = 0
    """Blocks that were evicted before they were copied to the disk."""
    num_digest_failures: int = 0
    """Blocks from the disk, or from other replicas, that were damaged, and were computed again; of the leading rank."""
    num_disk_errors: int = 0
    """Reads and writes of the disk, and transfers from other replicas, that failed; of the leading rank."""
    num_disk_blocks: int = 0
    """Blocks and snapshots on the disk that this replica can use; of the leading rank."""
    disk_bytes: int = 0
    """Bytes of the block store on the disk, other models' blocks included."""
    disk_backlog_bytes: int = 0
    """Bytes still to be written to the disk, on the leading rank."""
    num_received_tokens: int = 0
    """Tokens among `num_prefix_hit_tokens`, or of a preempted request, whose blocks came from another replica."""
    received_tokens_from: Mapping[str, int] = field(default_factory=dict)
    """The same by the address of the other replica's link; of the last senders."""
    num_cut_transfers: int = 0
    """Transfers from other replicas that did not bring all that was asked for: refused, late, cut or damaged."""
    num_sent_blocks: int = 0
    """Blocks and snapshots that were copied for other replicas."""
    received_bytes: int = 0
    """Bytes of blocks that came from other replicas, on the leading rank."""
    sent_bytes: int = 0
    """Bytes of blocks that went to other replicas, on the leading rank."""
    received_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Speed of the last transfers by the host of the other replica, and of all by the name ""; on the leading rank."""
    prefill_tokens_per_s: float = 0.0
    """The best of the last steps that computed prompts for the most part; 0 before there were some."""
    num_adapter_loads: int = 0
    """Adapters that were read and made resident."""
    num_resident_adapters: int = 0
    adapter_load_s: float = 0.0
    """Seconds that the last of them took, from the order to load it; 0 before the first."""
    gpu_utilization: float = 0.0
    """Share of the last moments in which the leading rank's GPU computed, from 0 to 1; 0 without a GPU."""
    gpu_memory_used_bytes: int = 0
    """Memory in use on the leading rank's GPU, other programs' included."""
    gpu_memory_total_bytes: int = 0
    """Memory of the leading rank's GPU; 0 without a GPU."""

    def note_gpu(self, gpu: "GpuStats") -> None:
        """Stores a measurement of the GPU."""
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
    """Current state of a GPU."""

    utilization: float = 0.0
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChanges:
    """Short hashes of blocks that are available from now on, and of blocks that no longer are; for a model that keeps
    states also of its snapshots (`short_snapshot`), and of resident adapters (`short_adapter`). No hash is in both.
    """

    stored: Sequence[int] = ()
    evicted: Sequence[int] = ()

    def __bool__(self) -> bool:
        return bool(self.stored or self.evicted)

    def parts(self, max_num: int) -> "Iterator[CacheChanges]":
        """The same in pieces of at most `max_num` hashes; at least one piece."""
        for start in range(0, max(len(self.stored) + len(self.evicted), 1), max_num):
            end = start + max_num
            gone = slice(max(0, start - len(self.stored)), max(0, end - len(self.stored)))
            yield CacheChanges(stored=self.stored[start:end], evicted=self.evicted[gone])


NO_CHANGES: Final = CacheChanges()


class PlainTokens(NamedTuple):
    """Columns of deltas with one token each and nothing else: nearly all of a step's deltas are of this kind.

    Engines make none; the codec of a link does, so that nothing is made for each of them.
    """

    attempts: Sequence[Hashable] = ()
    token_indices: Sequence[int] = ()
    """The output position of each token."""
    token_ids: Sequence[int] = ()

    @classmethod
    def split(cls, deltas: Sequence[TokenDelta]) -> "tuple[PlainTokens, list[TokenDelta]]":
        """Splits `deltas` into the ones that fit into columns, and the others. An attempt's own keep their order."""
        attempts: list[Hashable] = []
        indices: list[int] = []
        token_ids: list[int] = []
        others: list[TokenDelta] = []
        has_others: set[Hashable] = set()
        for delta in deltas:
            if is_plain(delta) and delta.attempt not in has_others:
                attempts.append(delta.attempt)
                indices.append(delta.first_token_index)
                token_ids.append(delta.token_ids[0])
            else:
                others.append(delta)
                has_others.add(delta.attempt)
        return cls(attempts, indices, token_ids), others


NO_TOKENS: Final = PlainTokens()


def is_plain(delta: TokenDelta) -> bool:
    """Whether it has one token and no other data."""
    return (
        delta.finish_reason is None
        and len(delta.token_ids) == 1
        and not (delta.num_cached_tokens or delta.logprobs or delta.prompt_logprobs or delta.queued_s)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A request that will not be run, and why."""

    attempt: Hashable
    error: HoldfastError


class FetchedAhead(NamedTuple):
    """Blocks that were fetched for a request that comes later, as far as they could be."""

    attempt: Any
    """Key of its attempt that runs elsewhere."""
    num_tokens: int
    """Tokens whose blocks are cached now, from the first one on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUpdate:
    """Results of one turn of the engine for one listener's requests, and the engine's load after it."""

    load: EngineLoad
    step_id: int = 0
    plain: PlainTokens = NO_TOKENS
    """Deltas in columns, which come before `deltas`."""
    deltas: Sequence[TokenDelta] = ()
    rejections: Sequence[Rejection] = ()
    cache: CacheChanges = NO_CHANGES
    """Changes of the cache since the last update, for a listener that follows it."""
    fetched_ahead: Sequence[FetchedAhead] = ()
    stats: EngineStats | None = None
    """Statistics in a listener's first update, whenever the engine has fallen idle, and each `STATS_EVERY_STEPS` steps.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a replica on each link."""

    facts: ReplicaFacts
    load: EngineLoad
    heartbeat_s: float = 0.0
    """Time between two heartbeats while there is work; 0: there are none."""
    frozen_after_s: float = 0.0
    """Seconds, or 20 expected steps, with work and without progress after which it is frozen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Progress of a busy replica, sent from the event loop, which its engine cannot block."""

    progress: int
    """Moves with every layer of a model and with every step."""
    expected_gap_s: float
    """Expected seconds of the step now running, by earlier steps."""
    starved_s: float = 0.0
    """Seconds that its work has stood still so far, all together, because other programs had the cores."""


class StepListener(Protocol):
    """Receives the updates of its requests. Called on the engine's thread: an implementation hands over and returns."""

    def on_update(self, update: StepUpdate) -> None:
        """Once per step, and whenever the load has changed without one.

        Each request ends with a delta that has a finish reason, or with a rejection.
        """

    def on_failure(self, error: HoldfastError) -> None:
        """The engine has ended. Nothing more will come; requests that have not ended are lost."""

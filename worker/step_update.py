"""Step updates: the messages from an engine to its listeners, as links carry them and routers take them in."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from holdfast.worker.errors import HoldfastError
from holdfast.worker.model_info import ReplicaFacts
from holdfast.worker.request import EngineLoad, TokenDelta
from holdfast.worker.stats import EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChanges:
    """Short hashes of blocks that can be had from now on, and of those that cannot any more. None is in both."""

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
    """Columns of deltas that bring one token each and nothing else: a step's deltas are of this kind but for a few.

    Engines make none; the codec of a link does, so that nothing is made for each of them.
    """

    attempts: Sequence[Hashable] = ()
    token_indices: Sequence[int] = ()
    """The output position of each token."""
    token_ids: Sequence[int] = ()

    @classmethod
    def split(cls, deltas: Sequence[TokenDelta]) -> "tuple[PlainTokens, list[TokenDelta]]":
        """Those of `deltas` that fit into columns, and the others. An attempt's own keep their order."""
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
    """Whether it brings one token and nothing else."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUpdate:
    """What a turn of the engine did for one listener's requests, and how busy the engine is after it."""

    load: EngineLoad
    step_id: int = 0
    plain: PlainTokens = NO_TOKENS
    """Deltas in columns, which come before `deltas`."""
    deltas: Sequence[TokenDelta] = ()
    rejections: Sequence[Rejection] = ()
    cache: CacheChanges = NO_CHANGES
    """For a listener that follows the cache: what came and went since its last update."""
    stats: EngineStats | None = None
    """In a listener's first update, whenever the engine has fallen idle, and each `STATS_EVERY_STEPS` steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a replica on each link."""

    facts: ReplicaFacts
    load: EngineLoad
    heartbeat_s: float = 0.0
    """Time between two heartbeats while there is work; 0: there are none."""
    frozen_after_s: float = 0.0
    """With work, and without progress for so long, or 20 expected steps, it is frozen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Progress of a busy replica, sent from the event loop, which its engine cannot block."""

    progress: int
    """Moves with every layer of a model and with every step."""
    expected_gap_s: float
    """How long the step now running should take, by what was seen before."""
    starved_s: float = 0.0
    """How long its work has stood still so far, all together, because other programs had the cores."""


class StepListener(Protocol):
    """Receives the updates of its requests. Called on the engine's thread: an implementation hands over and returns."""

    def on_update(self, update: StepUpdate) -> None:
        """Once per step, and whenever the load has changed without one.

        Each request ends with a delta that has a finish reason, or with a rejection.
        """

    def on_failure(self, error: HoldfastError) -> None:
        """The engine has ended. Nothing more will come; requests that have not ended are lost."""

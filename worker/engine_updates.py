"""What an engine tells those who listen to it, and how they are told.

What may live here: the messages and the listener's side. What may not: who hears of what (`mailboxes.py`).
"""

from dataclasses import dataclass
from typing import Protocol

from holdfast.worker.errors import HoldfastError
from holdfast.worker.kv.cache_events import NO_CHANGES, CacheChanges
from holdfast.worker.request import EngineLoad, TokenDelta
from holdfast.worker.stats import EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A request that will not be run, and why."""

    request_id: str
    error: HoldfastError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUpdate:
    """What a turn of the engine did for one listener's requests, and how busy the engine is after it."""

    step_id: int
    deltas: tuple[TokenDelta, ...]
    rejections: tuple[Rejection, ...]
    load: EngineLoad
    cache: CacheChanges = NO_CHANGES
    """For a listener that follows the cache: what came and went since its last update."""
    stats: EngineStats | None = None
    """In a listener's first update, whenever the engine has fallen idle, and each `STATS_EVERY_STEPS` steps."""


class StepListener(Protocol):
    """Who wants to hear of its requests. Called on the engine's thread: an implementation hands over and returns."""

    def on_update(self, update: EngineUpdate) -> None:
        """Once per step, and whenever the load has changed without one.

        Each request's last word is a delta with a finish reason, or a rejection.
        """

    def on_failure(self, error: HoldfastError) -> None:
        """The engine has ended. Nothing more will come; requests that have had no last word are lost."""

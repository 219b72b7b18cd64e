"""Suspects in one replica: its requests that are suspected of killing replicas, by the router that sent them.

Each router knows only its own requests, so the replica reports how many suspects of other routers it has, and keeps a
request on trial apart from them. What may live here: which requests are under suspicion here, and for how long. What
may not: judging them (`router/dispatch/quarantine.py`).
"""

from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Final, Generic, TypeVar

from holdfast.worker.errors import QueueFullError
from holdfast.worker.request import EngineLoad, TokenDelta
from holdfast.worker.suspicion import NUM_STEPS_TO_CLEAR, Suspicion

RETRY_S: Final = 0.05
"""When to ask again: a suspect is cleared within a few steps, or the replica is dead."""

Owner = TypeVar("Owner")


class Suspects(Generic[Owner]):
    """Requests under suspicion that run or wait here, by whose they are. They leave it with a few steps of output."""

    def __init__(self) -> None:
        self.requests: dict[Hashable, tuple[Owner, Suspicion]] = {}
        """By attempt. To be read only."""
        self._num_steps: dict[Hashable, int] = {}
        self.has_news = False
        """A suspect was added and not reported. It must be reported before it runs: the replica may die of it."""

    def check(self, suspicion: Suspicion, owner: Owner) -> None:
        """Raises `QueueFullError` while such a request must not run beside another router's suspects."""
        if not self.requests:
            return
        others = [theirs for other, theirs in self.requests.values() if other is not owner]
        is_in_the_way = suspicion is Suspicion.ON_TRIAL and bool(others)
        if is_in_the_way or (suspicion is Suspicion.SUSPECT and Suspicion.ON_TRIAL in others):
            raise QueueFullError("a suspect of another router runs here, and the two are tried apart", RETRY_S)

    def add(self, attempt: Hashable, suspicion: Suspicion, owner: Owner) -> None:
        """It runs or waits here from now on; one that is under no suspicion is ignored."""
        if suspicion is not Suspicion.NONE:
            self.requests[attempt] = (owner, suspicion)
            self._num_steps[attempt] = 0
            self.has_news = True

    def note(self, deltas: Iterable[TokenDelta]) -> None:
        """Requests have got on, or have ended."""
        for delta in deltas:
            if delta.attempt in self.requests:
                self._num_steps[delta.attempt] += 1
                if delta.finish_reason is not None or self._num_steps[delta.attempt] == NUM_STEPS_TO_CLEAR:
                    self.drop(delta.attempt)

    def drop(self, attempt: Hashable) -> None:
        """It has gone, or is under suspicion no longer. Unknown keys are ignored."""
        if self.requests.pop(attempt, None) is not None:
            del self._num_steps[attempt]

    def load_for(self, owner: Owner | None, load: EngineLoad) -> EngineLoad:
        """The replica's load as reported to this owner; None: an owner without requests here."""
        num_foreign = sum(other is not owner for other, _ in self.requests.values())
        return load if num_foreign == load.num_foreign_suspects else replace(load, num_foreign_suspects=num_foreign)

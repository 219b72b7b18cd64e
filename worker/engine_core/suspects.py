"""The suspects that a replica has of several routers, none of which knows those of the others.

Each router blames a death on its own requests alone, so the replica helps it out: it tells how many suspects of others
are there, and keeps a request on trial apart from them. What may live here: who is under suspicion here, and for how
long. What may not: judging (`router/dispatch/quarantine.py`).
"""

from dataclasses import replace
from typing import Final, Generic, TypeVar

from holdfast.worker.errors import QueueFullError
from holdfast.worker.request import EngineLoad, EngineRequest, TokenDelta
from holdfast.worker.suspicion import NUM_STEPS_TO_CLEAR, Suspicion

RETRY_S: Final = 0.05
"""When to ask again: a suspect is cleared within a few steps, or the replica is dead."""

Owner = TypeVar("Owner")


class Suspects(Generic[Owner]):
    """Requests under suspicion that run or wait here, by whose they are. They leave it with a few steps of output."""

    def __init__(self) -> None:
        self._suspects: dict[str, tuple[Owner, Suspicion]] = {}
        self._num_steps: dict[str, int] = {}
        self.has_news = False
        """One has come in that nobody has been told of. It must be told before it runs: it may be the last word."""

    def check(self, request: EngineRequest, owner: Owner) -> None:
        """Raises `QueueFullError` while the request must not run beside another router's suspects."""
        others = [suspicion for other, suspicion in self._suspects.values() if other is not owner]
        is_in_the_way = request.suspicion is Suspicion.ON_TRIAL and bool(others)
        if is_in_the_way or (request.suspicion is Suspicion.SUSPECT and Suspicion.ON_TRIAL in others):
            raise QueueFullError("a suspect of another router runs here, and the two are tried apart", RETRY_S)

    def add(self, request: EngineRequest, owner: Owner) -> None:
        """The request runs or waits here from now on; one that is under no suspicion is ignored."""
        if request.suspicion is not Suspicion.NONE:
            self._suspects[request.request_id] = (owner, request.suspicion)
            self._num_steps[request.request_id] = 0
            self.has_news = True

    def note(self, delta: TokenDelta) -> None:
        """A request has got on, or has ended."""
        if delta.request_id in self._suspects:
            self._num_steps[delta.request_id] += 1
            if delta.finish_reason is not None or self._num_steps[delta.request_id] == NUM_STEPS_TO_CLEAR:
                self.drop(delta.request_id)

    def drop(self, request_id: str) -> None:
        """It has gone, or is under suspicion no longer. Ids that are unknown are ignored."""
        if self._suspects.pop(request_id, None) is not None:
            del self._num_steps[request_id]

    def load_for(self, owner: Owner | None, load: EngineLoad) -> EngineLoad:
        """The replica's load as this owner is to hear of it; None has nothing here."""
        num_foreign = sum(other is not owner for other, _ in self._suspects.values())
        return load if num_foreign == load.num_foreign_suspects else replace(load, num_foreign_suspects=num_foreign)

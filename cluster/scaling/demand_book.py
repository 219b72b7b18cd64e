"""Demand book: which models are scaled by their load, and what each router has told of them lately. A core.

Time is passed in, in seconds of any one clock. What may not live here: the actor that keeps it
(`cluster/serve/directory.py`), and what is decided by it (`autoscaler.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Final

from holdfast.router.demand import ModelDemand, merged, with_counts_of, with_counts_since

FRESH_S: Final = 5.0
"""What a router has told counts for so long: it tells every second or so."""

FOLLOWED_S: Final = 30.0
"""A model that nobody has asked about for so long is scaled no more."""

PINNED_S: Final = 3600.0
"""A number that an update has set holds for so long at most, should the update have been killed."""

Followed = tuple[tuple[str, float | None], ...]
"""Names of models, in order, and how long requests wait for one at rest; None: it is never at rest."""


class DemandBook:
    """Kept by the directory, which every router and every autoscaler reaches."""

    def __init__(self) -> None:
        self._followed: dict[str, tuple[float | None, float]] = {}
        self._told: dict[str, tuple[float, Sequence[ModelDemand]]] = {}
        self._pinned: dict[str, tuple[int, float]] = {}
        self._counted: dict[str, ModelDemand] = {}
        """By model: what routers have counted since the book knows them. A router that comes, goes or falls silent
        changes these counts by nothing: its whole past would look like a burst.
        """

    def follow(self, model: str, cold_start_wait_s: float | None, now_s: float) -> bool:
        """An autoscaler asks about a model. Returns whether routers have to hear of it."""
        before = self._followed.get(model)
        self._followed[model] = cold_start_wait_s, now_s
        return before is None or before[0] != cold_start_wait_s

    def note(self, router_id: str, demands: Sequence[ModelDemand], now_s: float) -> None:
        """What a router sees now, of all models that are followed."""
        _, before = self._told.get(router_id, (now_s, ()))
        earlier = {one.model: one for one in before}
        for one in demands:
            if one.model in earlier:
                counted = self._counted.get(one.model, ModelDemand(model=one.model))
                self._counted[one.model] = with_counts_since(counted, earlier[one.model], one)
        self._told[router_id] = now_s, demands

    def demand(self, model: str, now_s: float) -> ModelDemand | None:
        """What routers see of a model together; None if none has told of it lately. Counts are those since the book
        knows its routers.
        """
        fresh = [demands for told_s, demands in self._told.values() if now_s - told_s <= FRESH_S]
        found = [one for demands in fresh for one in demands if one.model == model]
        return with_counts_of(merged(model, found), self._counted.get(model)) if found else None

    def pin(self, application: str, num_replicas: int | None, now_s: float) -> None:
        """An update sets the number of an application's replicas, whatever the load; None: the load decides again."""
        if num_replicas is None:
            self._pinned.pop(application, None)
        else:
            self._pinned[application] = num_replicas, now_s

    def pinned(self, now_s: float) -> Mapping[str, int]:
        """The numbers that hold whatever the load, by application."""
        return {name: number for name, (number, set_s) in self._pinned.items() if now_s - set_s <= PINNED_S}

    def expire(self, now_s: float) -> bool:
        """Forgets what is old. Returns whether routers have to hear of it."""
        self._told = {name: told for name, told in self._told.items() if now_s - told[0] <= FRESH_S}
        kept = {model: one for model, one in self._followed.items() if now_s - one[1] <= FOLLOWED_S}
        has_changed = kept.keys() != self._followed.keys()
        self._followed = kept
        self._counted = {model: counted for model, counted in self._counted.items() if model in kept}
        return has_changed

    @property
    def followed(self) -> Followed:
        """The models that are scaled by their load."""
        return tuple((model, self._followed[model][0]) for model in sorted(self._followed))

"""Outages: how long requests wait for a replica of a model that has none, and what they are told once that is over.

It is the same wait whether the replicas were lost or the model is at rest, where the first request wakes it; only the
limits differ. What may not live here: which models have none (`router/replicas/replica_registry.py`), and how requests
end (`endings.py`).
"""

from collections.abc import Iterator

from holdfast.router.dispatch.admission import AdmissionQueue
from holdfast.router.replicas.replica_registry import ReplicaRegistry
from holdfast.worker.errors import ReplicaError


class Outages:
    """Of the models of one router."""

    def __init__(self, registry: ReplicaRegistry, queue: AdmissionQueue, replica_wait_s: float) -> None:
        """`replica_wait_s`: the limit for models that are not at rest."""
        self._registry = registry
        self._queue = queue
        self._replica_wait_s = replica_wait_s

    def admit(self, model: str, now: float) -> None:
        """The first request that waits for a model at rest wakes it: the wait for a replica begins with it.

        Raises `UnknownModelError`, or `ReplicaError` where a new request would wait in vain.
        """
        if model in self._registry.asleep and not self._queue.has_any(model):
            self._registry.note_wake(model, now)
        down_since = self._registry.model(model).down_since
        if down_since is not None and now >= down_since + self._limit_s(model):
            raise self.error(model)

    def over(self, now: float) -> Iterator[str]:
        """The models for which nothing waits any longer."""
        for model, down_since in self._registry.outages():
            if now >= down_since + self._limit_s(model):
                yield model

    def ends(self) -> Iterator[float]:
        """The times at which what waits now will have waited too long."""
        for model, down_since in self._registry.outages():
            if self._queue.has_any(model):
                yield down_since + self._limit_s(model)

    def error(self, model: str) -> ReplicaError:
        """What those are told who have waited in vain."""
        cold_start_s = self._registry.asleep.get(model)
        if cold_start_s is None:
            return ReplicaError(f"no replica of model {model!r} is up")
        told = f"none has started within {cold_start_s:g} s (scaling.cold_start_wait_s)"
        return ReplicaError(f"model {model!r} had no replica at rest, and {told}")

    def _limit_s(self, model: str) -> float:
        cold_start_s = self._registry.asleep.get(model)
        return self._replica_wait_s if cold_start_s is None else cold_start_s

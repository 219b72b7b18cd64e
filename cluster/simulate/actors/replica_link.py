"""A replica's end of one simulated link: what `worker/replica/link.py` is, with plain data for a wire.

What may live here: the engine's words as the router's core takes them, and whether they are what `StepListener`
promises. What may not: names of attempts (`worker/engine_core/link_session.py`), whose request is whose
(`worker/engine_core/engine_core.py`).
"""

from dataclasses import fields
from typing import Final

from holdfast.cluster.simulate.kernel.network import Connection
from holdfast.cluster.simulate.kernel.process import Process
from holdfast.cluster.simulate.kernel.promises import Violation
from holdfast.router.events import AttemptDelta, AttemptRejection, Likelihood, ReplicaStats, SendSubmit, StepNews
from holdfast.worker.engine_core.link_session import LinkSession
from holdfast.worker.engine_updates import EngineUpdate
from holdfast.worker.errors import HoldfastError
from holdfast.worker.request import EngineRequest, TokenDelta
from holdfast.worker.stats import EngineStats

_STATS_NAMES: Final = tuple(item.name for item in fields(ReplicaStats))


class ReplicaLink:
    """One router's connection: a `StepListener` that sends on what it hears."""

    def __init__(self, session: LinkSession, replica: Process, connection: Connection) -> None:
        self.session = session
        self._replica = replica
        self._connection = connection
        self._due: dict[str, int] = {}  # the next output position, by requests that have had no last word

    @property
    def num_unanswered(self) -> int:
        """Requests that have had no last word."""
        return len(self._due)

    def take_in(self, submit: SendSubmit) -> EngineRequest:
        """The request as the engine is to know it."""
        request = self.session.named(submit.request, submit.attempt)
        self._due[request.request_id] = len(request.output_token_ids)
        return request

    def on_update(self, update: EngineUpdate) -> None:
        self._check(update)
        news = StepNews(
            load=update.load,
            deltas=[self._delta(delta) for delta in update.deltas],
            rejections=[
                AttemptRejection(attempt=self.session.attempt(rejection.request_id), error=rejection.error)
                for rejection in update.rejections
            ],
            stored=update.cache.stored,
            evicted=update.cache.evicted,
            stats=None if update.stats is None else _replica_stats(update.stats),
        )
        self._connection.send(self._replica, news)

    def on_failure(self, error: HoldfastError) -> None:
        """The stream ends."""
        self._replica.hang_up(self._connection)

    def _check(self, update: EngineUpdate) -> None:
        """Tokens follow each other without gap or overlap, and nothing follows a last word."""
        for delta in update.deltas:
            due = self._due.pop(delta.request_id, None)
            if due != delta.first_token_index:
                raise Violation(f"{self._replica}: {delta}, and what was due is {due}")
            if delta.finish_reason is None:
                self._due[delta.request_id] = due + len(delta.token_ids)
        for rejection in update.rejections:
            if self._due.pop(rejection.request_id, None) is None:
                raise Violation(f"{self._replica}: {rejection} after the last word")

    def _delta(self, delta: TokenDelta) -> AttemptDelta:
        return AttemptDelta(
            attempt=self.session.attempt(delta.request_id),
            first_token_index=delta.first_token_index,
            token_ids=delta.token_ids,
            finish_reason=delta.finish_reason,
            num_cached_tokens=delta.num_cached_tokens,
            logprobs=delta.logprobs,
            prompt_logprobs=[
                Likelihood(item.logprob, item.rank, item.top) for item in delta.prompt_logprobs if item is not None
            ],
        )


def _replica_stats(stats: EngineStats) -> ReplicaStats:
    """The fields have the same names."""
    return ReplicaStats(**{name: getattr(stats, name) for name in _STATS_NAMES})

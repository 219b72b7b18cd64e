"""The link to a replica in this process: a port for the dispatch host, and a listener for the engine.

What may live here: the hand-over between the engine's thread and the event loop, and the words of the one in those of
the other. What may not: decisions, and what becomes of a request (`router/dispatch/`).
"""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Final

from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.events import (
    AttemptDelta,
    AttemptRejection,
    Likelihood,
    ReplicaFacts,
    SendAbort,
    SendSubmit,
    StepNews,
)
from holdfast.worker.engine_core.link_session import LinkSession
from holdfast.worker.engine_updates import EngineUpdate
from holdfast.worker.errors import HoldfastError
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import TokenDelta

REPLICA_ID: Final = "local"


class LocalReplica:
    """One replica, up from `connect` until its engine ends. Lives on the event loop, but for what the engine calls."""

    def __init__(self, replica: Replica, dispatch_host: DispatchHost, loop: asyncio.AbstractEventLoop) -> None:
        self._replica = replica
        self._dispatch_host = dispatch_host
        self._loop = loop
        self._session = LinkSession(REPLICA_ID)
        self._unheard: deque[EngineUpdate | HoldfastError] = deque()
        self._is_hearing = False
        self.failure: HoldfastError | None = None
        """Why the engine has ended; None while it runs."""

    def connect(self) -> None:
        """Raises `ReplicaError` if the engine has ended."""
        engine = self._replica.engine
        engine.attach(self)
        self._dispatch_host.replica_up(self, replica_facts(self._replica.info), engine.load)

    # --- for the dispatch host ---

    def submit(self, action: SendSubmit) -> None:
        with suppress(HoldfastError):  # `on_failure` is on its way
            self._replica.engine.submit(self._session.named(action.request, action.attempt), self)

    def abort(self, action: SendAbort) -> None:
        self._replica.engine.abort(self._session.request_id(action.attempt))

    # --- on the engine's thread ---

    def on_update(self, update: EngineUpdate) -> None:
        self._loop.call_soon_threadsafe(self._take, update)

    def on_failure(self, error: HoldfastError) -> None:
        self._loop.call_soon_threadsafe(self._take, error)

    # --- on the event loop ---

    def _take(self, item: EngineUpdate | HoldfastError) -> None:
        self._unheard.append(item)
        if not self._is_hearing:
            self._is_hearing = True
            self._hear_next()

    def _hear_next(self) -> None:
        """One update in each turn of the loop: whoever waits reads it before the next one, and so sees every step."""
        if not self._unheard:
            self._is_hearing = False
            return
        item = self._unheard.popleft()
        try:
            if isinstance(item, EngineUpdate):
                self._dispatch_host.replica_news(REPLICA_ID, self._news(item))
            else:
                self._end(item)
        finally:
            self._loop.call_soon(self._hear_next)  # after those whom this wakes

    def _end(self, error: HoldfastError) -> None:
        """There is no other replica to go on with what ran here."""
        self.failure = error
        self._dispatch_host.close_all(error)
        self._dispatch_host.replica_down(REPLICA_ID, error)

    def _news(self, update: EngineUpdate) -> StepNews:
        return StepNews(
            load=update.load,
            deltas=[self._delta(delta) for delta in update.deltas],
            rejections=[
                AttemptRejection(attempt=self._session.attempt(rejection.request_id), error=rejection.error)
                for rejection in update.rejections
            ],
        )

    def _delta(self, delta: TokenDelta) -> AttemptDelta:
        return AttemptDelta(
            attempt=self._session.attempt(delta.request_id),
            first_token_index=delta.first_token_index,
            token_ids=delta.token_ids,
            finish_reason=delta.finish_reason,
            num_cached_tokens=delta.num_cached_tokens,
            logprobs=delta.logprobs,
            prompt_logprobs=_likelihoods(delta) if delta.prompt_logprobs else (),
        )


def _likelihoods(delta: TokenDelta) -> list[Likelihood]:
    return [Likelihood(item.logprob, item.rank, item.top) for item in delta.prompt_logprobs if item is not None]


def replica_facts(info: ModelInfo) -> ReplicaFacts:
    """What the hello of a served replica says."""
    return ReplicaFacts(
        replica_id=REPLICA_ID,
        model=info.name,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        tensor_parallel_size=info.tensor_parallel_size,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        row_invariant=info.row_invariant,
        eos_token_ids=info.eos_token_ids,
        numerics=info.numerics,
        answers_digest=info.answers_digest,
    )

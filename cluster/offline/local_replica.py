"""In-process link to a replica: a port for the dispatch host, and a listener for the engine.

What may live here: the hand-over between the engine's thread and the event loop. What may not: decisions, and what
becomes of a request (`router/dispatch/`).
"""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Final

from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.events import SendAbort, SendSubmit
from holdfast.worker.errors import HoldfastError, ReplicaError
from holdfast.worker.model_info import ReplicaFacts
from holdfast.worker.replica.replica import Replica
from holdfast.worker.step_update import StepUpdate

REPLICA_ID: Final = "local"
"""The first one's: weights that are put in place later make another replica."""


class LocalReplica:
    """One replica with the weights that it has now, up from `connect` until its engine ends or it is replaced. Lives on
    the event loop, but for what the engine calls.
    """

    def __init__(
        self,
        replica: Replica,
        dispatch_host: DispatchHost,
        loop: asyncio.AbstractEventLoop,
        replica_id: str = REPLICA_ID,
    ) -> None:
        self.replica_id = replica_id
        self._replica = replica
        self._dispatch_host = dispatch_host
        self._loop = loop
        self._pending: deque[StepUpdate | HoldfastError] = deque()
        self._is_draining = False
        self.failure: HoldfastError | None = None
        """The error that has ended the engine; None while it runs."""

    def connect(self) -> None:
        """Raises `ReplicaError` if the engine has ended."""
        engine = self._replica.engine
        engine.attach(self)
        self._dispatch_host.replica_up(self, ReplicaFacts.of(self.replica_id, self._replica.info), engine.load)

    def retire(self) -> None:
        """New requests wait; those that run go on."""
        self._dispatch_host.replica_retiring(self.replica_id, True)

    def detach(self) -> None:
        """The engine drops its requests, and tells nothing more of them."""
        self._replica.engine.detach(self)

    def give_way(self) -> None:
        """To the replica that has just connected: requests that were still here go on there."""
        self._dispatch_host.replica_down(self.replica_id, ReplicaError("its weights were replaced"))

    def end(self, error: HoldfastError) -> None:
        """Fails the requests: there is no other replica to continue them."""
        self.failure = error
        self._dispatch_host.close_all(error)
        self._dispatch_host.replica_down(self.replica_id, error)

    # --- for the dispatch host ---

    def submit(self, action: SendSubmit) -> None:
        with suppress(HoldfastError):  # `on_failure` is on its way
            self._replica.engine.submit(action.request, self, action.attempt)

    def abort(self, action: SendAbort) -> None:
        self._replica.engine.abort(action.attempt)

    # --- on the engine's thread ---

    def on_update(self, update: StepUpdate) -> None:
        self._loop.call_soon_threadsafe(self._take, update)

    def on_failure(self, error: HoldfastError) -> None:
        self._loop.call_soon_threadsafe(self._take, error)

    # --- on the event loop ---

    def _take(self, item: StepUpdate | HoldfastError) -> None:
        self._pending.append(item)
        if not self._is_draining:
            self._is_draining = True
            self._handle_next()

    def _handle_next(self) -> None:
        """Handles one update in each turn of the loop, so that readers see every step before the next one comes."""
        if not self._pending:
            self._is_draining = False
            return
        item = self._pending.popleft()
        try:
            if isinstance(item, StepUpdate):
                self._dispatch_host.replica_update(self.replica_id, item)
            else:
                self.end(item)
        finally:
            self._loop.call_soon(self._handle_next)  # after those whom this wakes

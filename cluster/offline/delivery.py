"""Gives a replica's answers to whoever waits for them.

Text work runs on a thread of its own, so that the engine's thread never waits for it. What may not live here: how
requests are made (`inference_engine.py`), and what a single one has come to (`completion.py`).
"""

import logging
import queue
import threading
from collections.abc import Hashable

from holdfast.cluster.offline.completion import Completion
from holdfast.worker.errors import HoldfastError, InternalError
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import TokenDelta
from holdfast.worker.step_update import StepUpdate

logger = logging.getLogger(__name__)


class Delivery:
    """A `StepListener` that hands the engine's updates to a thread, which turns them into text and calls back."""

    def __init__(self, replica: Replica) -> None:
        self._engine = replica.engine
        self._open: dict[Hashable, Completion] = {}
        self._inbox: queue.SimpleQueue[StepUpdate | HoldfastError] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="delivery", daemon=True)
        self._thread.start()
        self._engine.attach(self)

    def open(self, completion: Completion) -> None:
        """Submits a request and remembers who waits for it. Raises `ReplicaError` if the engine has ended."""
        self._open |= {request.request_id: completion for request in completion.engine_requests}
        try:
            for request in completion.engine_requests:
                self._engine.submit(request, self)
        except HoldfastError:
            for request in completion.engine_requests:
                self._open.pop(request.request_id, None)
            raise
        if completion.future.done():  # one was refused while others were still on their way
            self._abort(completion)

    def abort(self, request_id: str) -> None:
        """Ends all sequences of a request. From any thread; an id that is not open is ignored."""
        for completion in list(self._open.values()):
            if completion.request.request_id == request_id:
                self._abort(completion)
                return

    def join(self) -> None:
        """Waits until everyone has been answered. The engine must have ended."""
        self._thread.join()

    def on_update(self, update: StepUpdate) -> None:
        self._inbox.put(update)

    def on_failure(self, error: HoldfastError) -> None:
        self._inbox.put(error)

    def _run(self) -> None:
        while isinstance(item := self._inbox.get(), StepUpdate):
            self._deliver(item)
        while self._open:
            _, completion = self._open.popitem()
            if not completion.future.done():
                completion.fail(item)

    def _deliver(self, update: StepUpdate) -> None:
        for rejection in update.rejections:
            refused = self._open.get(rejection.attempt)
            if refused is not None:
                refused.fail(rejection.error)
                self._close(refused, rejection.attempt)
        for delta in update.deltas:
            completion = self._open.get(delta.attempt)
            if completion is None:
                continue  # it ended at a stop string; the engine heard of that a step later
            self._take(completion, delta)

    def _take(self, completion: Completion, delta: TokenDelta) -> None:
        """A bug in one request's text ends that request, and no other."""
        try:
            completion.take(delta)
        except Exception as bug:
            logger.exception("request %s failed", delta.attempt)
            completion.fail(InternalError(f"turning tokens into text failed: {type(bug).__name__}: {bug}"))
        self._close(completion, delta.attempt if delta.finish_reason is not None else None)

    def _close(self, completion: Completion, ended_id: Hashable) -> None:
        """Forgets the sequences that have ended, and stops those of them that the engine goes on with: by now it has
        ended `ended_id` at most.
        """
        for request_id in completion.ended_ids:
            if self._open.pop(request_id, None) is not None and request_id != ended_id:
                self._engine.abort(request_id)

    def _abort(self, completion: Completion) -> None:
        for request in completion.engine_requests:
            self._engine.abort(request.request_id)

"""In-process router: request processor and dispatch host on an event loop, in a separate thread."""

import asyncio
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from holdfast.cluster.loop_thread import LoopThread
from holdfast.cluster.offline.request_handle import RequestHandle
from holdfast.cluster.tokenizers import load_tokenizer
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.events import SendAbort, SendAhead, SendSubmit, SendTakePins
from holdfast.router.generation import OutputDelta
from holdfast.router.requests.request_admission import ServedAdapter
from holdfast.router.requests.request_processor import Pipeline, RequestProcessor
from holdfast.router.security.gate import Gate
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.adapter import Adapter
from holdfast.worker.config import ServiceOrderConfig
from holdfast.worker.errors import HoldfastError, ReplicaError, RequestAbortedError
from holdfast.worker.model_info import ReplicaFacts
from holdfast.worker.replica.replica import Replica
from holdfast.worker.settings import MAX_WHOLE
from holdfast.worker.step_update import StepUpdate

ResultT = TypeVar("ResultT")

REPLICA_ID: Final = "local"
"""The first one's: weights that are put in place later make another replica."""


class LocalReplica:
    """One replica with the weights that it has now, up from `connect` until its engine ends or it is replaced. Lives on
    the event loop, except for the engine's callbacks.
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
        """Holds new requests; running ones continue."""
        self._dispatch_host.replica_retiring(self.replica_id, True)

    def detach(self) -> None:
        """The engine drops its requests, without further output."""
        self._replica.engine.detach(self)

    def fail_over(self) -> None:
        """Moves requests that were still here to the replica that has just connected."""
        self._dispatch_host.replica_down(self.replica_id, ReplicaError("its weights were replaced"))

    def end(self, error: HoldfastError) -> None:
        """Fails the requests: there is no other replica to continue them."""
        self.failure = error
        self._dispatch_host.close_all(error)
        self._dispatch_host.replica_down(self.replica_id, error)

    # --- for the dispatch host ---

    def submit(self, action: SendSubmit) -> None:
        """Submits an attempt to the engine of this process."""
        with suppress(HoldfastError):  # `on_failure` is on its way
            self._replica.engine.submit(action.request, self, action.attempt)

    def abort(self, action: SendAbort) -> None:
        """Ends an attempt in the engine of this process."""
        self._replica.engine.abort(action.attempt)

    def take_pins(self, action: SendTakePins) -> None:
        """There is no other replica that could leave."""

    def fetch_ahead(self, action: SendAhead) -> None:
        self._replica.engine.fetch_ahead(action.request, self, action.attempt)

    # --- on the engine's thread ---

    def on_update(self, update: StepUpdate) -> None:
        """Takes an update to the event loop. On the engine's thread."""
        self._loop.call_soon_threadsafe(self._take, update)

    def on_failure(self, error: HoldfastError) -> None:
        """Takes the engine's end to the event loop. On the engine's thread."""
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


def local_pipeline(
    config: RouterConfig,
    limits: LimitsConfig,
    on_models_changed: Callable[[], None] = lambda: None,
    *,
    order: ServiceOrderConfig | None = None,
    gate: Gate | None = None,
) -> Pipeline:
    """Pipeline for a replica in this process: there is no choice among replicas, and no other one to wait for."""
    alone = config.model_copy(update={"routing_policy": "power_of_two", "replica_wait_s": 0.0})
    return Pipeline.build(
        alone,
        limits,
        load_tokenizer,
        on_models_changed,
        order=order,
        gate=gate,
        random_index=random.Random(0).randrange,
    )


async def connected(replica: Replica, pipeline: Pipeline) -> LocalReplica:
    """Connects a replica of this process, on the running loop. Raises what `load_tokenizer` raises, and `ReplicaError`
    if the engine has ended.
    """
    await pipeline.tokenizers.load(replica.info.model, replica.info.path, replica.info.chat_template)
    local = LocalReplica(replica, pipeline.dispatch_host, asyncio.get_running_loop())
    local.connect()
    return local


class LocalRouter:
    """The router of one replica. Made by `start`; its public methods may be called from any thread."""

    def __init__(self) -> None:
        self._thread = LoopThread("router", _stopped, _new_event_loop)
        self._loop = self._thread.loop
        self._gate = threading.Lock()
        self._is_closed = False
        self._open: dict[RequestHandle, asyncio.Task[tuple[OutputDelta, ...]]] = {}
        self._processor: RequestProcessor
        self._replica: LocalReplica
        self._engine_replica: Replica
        self._dispatch_host: DispatchHost
        self._updating = asyncio.Lock()
        self._num_replaced = 0
        self.tokenizer: Tokenizer
        self.model: str

    @classmethod
    def start(cls, replica: Replica, limits: LimitsConfig, *, max_waiting: int) -> "LocalRouter":
        """Up when this returns. At most `max_waiting` requests wait in the replica; more wait here.

        Raises what `load_tokenizer` raises, and `ReplicaError` if the engine has ended.
        """
        router = cls()
        try:
            router._thread.run(router._set_up(replica, limits, max_waiting))
        except BaseException:  # an interrupt as well: the thread may not be left running
            router.close()
            raise
        return router

    def submit(self, request: RequestHandle) -> None:
        """Begins a request; its caller gets an answer whatever happens. Raises the error that has ended the router."""
        with self._gate:
            if self._is_closed:
                raise _stopped()
            if self._replica.failure is not None:
                raise self._replica.failure
            self._loop.call_soon_threadsafe(self._begin, request)

    def cancel(self, request: RequestHandle) -> None:
        """Ends a request, if it is open, with its output so far."""
        with self._gate:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._cancel, request)

    def abort(self, request_id: str) -> None:
        """`cancel`, by request id."""
        with self._gate:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._abort, request_id)

    def add_adapter(self, adapter: Adapter) -> None:
        """Requests for `adapter.key` run with it from now on."""
        self._processor.adapters.exact[adapter.key] = ServedAdapter(self.model, adapter)

    def update_weights(self, folder: str, version: str, *, replay: bool) -> None:
        """Replaces the weights. Running requests finish before, or with `replay` continue with the new weights after
        their tokens so far. Blocking. Raises what `Replica.update_weights` raises.
        """
        self._thread.run(self._update_weights(folder, version, replay=replay))

    def run(self, work: Callable[[RequestProcessor, DispatchHost], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Result of `work` on the router's loop, with what serves its requests. Blocking."""
        return self._thread.run(work(self._processor, self._dispatch_host))

    def is_this_thread(self) -> bool:
        """Whether the caller is on the router's own thread, where waiting for a request would block it for ever."""
        return self._thread.is_this_thread()

    def end_all(self) -> None:
        """Admits no more requests, and ends the open ones with their output so far."""
        with self._gate:
            self._is_closed = True
        self._thread.run(self._end_all())

    def close(self) -> None:
        """Ends the thread, and answers who still waits on it. The engine must have ended."""
        self._thread.close()

    # --- on the event loop ---

    async def _set_up(self, replica: Replica, limits: LimitsConfig, max_waiting: int) -> None:
        config = RouterConfig(
            max_waiting_per_replica=max_waiting,
            retry_burst=min(limits.max_queued + max_waiting, MAX_WHOLE),  # all of them may move to other weights
        )
        patient = limits.model_copy(update={"default_timeout_s": math.inf})  # no other callers need the room
        pipeline = local_pipeline(config, patient)
        self._replica = await connected(replica, pipeline)
        self.model, self._engine_replica = replica.info.model, replica
        self.tokenizer = pipeline.tokenizers[self.model]
        self._processor, self._dispatch_host = pipeline.processor, pipeline.dispatch_host

    async def _update_weights(self, folder: str, version: str, *, replay: bool) -> None:
        """Changes weights. Other weights count as another replica: the router moves open requests as it does from any
        lost one.
        """
        async with self._updating:
            old = self._replica
            if old.failure is not None:
                raise old.failure
            old.retire()
            if not replay:
                is_free = asyncio.Event()
                self._dispatch_host.when_free(old.replica_id, is_free.set)
                await is_free.wait()
            old.detach()
            self._dispatch_host.dispatch.release_versions(self._engine_replica.info.model)
            try:
                await asyncio.to_thread(self._engine_replica.update_weights, folder, version)
            finally:
                self._replace(old)

    def _replace(self, old: LocalReplica) -> None:
        self._num_replaced += 1
        replica_id = f"{REPLICA_ID}-{self._num_replaced}"
        new = LocalReplica(self._engine_replica, self._dispatch_host, self._loop, replica_id)
        try:
            new.connect()
        except HoldfastError as error:
            old.end(error)
        else:
            self._replica = new
            old.fail_over()

    def _begin(self, request: RequestHandle) -> None:
        task = self._loop.create_task(request.run(self._processor))
        self._open[request] = task
        task.add_done_callback(partial(self._end, request))

    def _end(self, request: RequestHandle, task: asyncio.Task[tuple[OutputDelta, ...]]) -> None:
        del self._open[request]
        request.end(task, self._replica.failure)

    def _cancel(self, request: RequestHandle) -> None:
        if request in self._open:
            self._open[request].cancel()

    def _abort(self, request_id: str) -> None:
        """Aborts only requests whose callers chose this id, not requests that have it by default."""
        named = [request for request in self._open if request.request_id == request_id]
        for request in [one for one in named if one.has_own_id] or named:
            self._open[request].cancel()

    async def _end_all(self) -> None:
        self._processor.close()
        tasks = list(self._open.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _stopped() -> RequestAbortedError:
    return RequestAbortedError("the engine was stopped")


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's if it is installed, as it is with Ray: it is the faster one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()

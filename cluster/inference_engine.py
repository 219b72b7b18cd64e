"""The whole system in one process, without Ray or gRPC: text in, text out, from any thread or event loop.

What may live here: tokenizing, handing requests to a replica, and giving its answers to whoever waits. Text work runs
on a delivery thread of its own, so that the engine's thread never waits for it.
"""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster.bundled_model import located
from cluster.completion import Callback, Completion
from cluster.config import HoldfastConfig, load_config
from cluster.config_sources import mapping_layer
from cluster.outputs import RequestOutput
from router.controls import bad_word_token_ids, check_controls
from router.grammar import GrammarCompiler
from router.request import derived_seed
from router.tokenizer import Tokenizer
from worker.batching_optimizer import Recommendation
from worker.config import WorkerConfig
from worker.engine import EngineStats, EngineUpdate
from worker.errors import HoldfastError, InternalError, RequestAbortedError
from worker.model_info import ModelInfo
from worker.rank import RankLauncher
from worker.replica import Progress, Replica
from worker.request import EngineRequest, Priority, SamplingParams, TokenDelta

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
"""Text, or token ids."""


class RequestHandle:
    """A request that was submitted."""

    def __init__(self, engine: "InferenceEngine", completion: Completion) -> None:
        self._engine = engine
        self.request_id = completion.request.request_id
        self.future = completion.future

    def result(self, timeout_s: float | None = None) -> RequestOutput:
        """Waits for the end. Raises what ended the request if it did not finish, or `TimeoutError`."""
        return self.future.result(timeout_s)

    def cancel(self) -> None:
        """Ends the request within one step. `result` then returns what there is, with finish reason `abort`."""
        self._engine.abort(self.request_id)


class InferenceEngine:
    """One replica and the text around it. Thread-safe. Usable as a context manager.

    `config` is a tree of settings as in a configuration file (`{"parallel": {"tensor_parallel_size": 2}}`), or one that
    has been checked. Raises `ConfigurationError` for what is wrong in it. `model` comes before what it says.

    Same model, settings and `seed`, and the same requests in the same order, give the same outputs: a request without a
    seed of its own gets one derived from `seed` and its number.
    """

    def __init__(
        self,
        model: str | None = None,
        config: WorkerConfig | Mapping[str, object] | None = None,
        *,
        seed: int = 0,
        launcher: RankLauncher | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._config = located(_worker_config(model, config))
        self._seed = seed
        self._launcher = launcher
        self._progress = progress
        self._numbers = itertools.count()
        self._replica: Replica | None = None
        self._delivery: _Delivery | None = None
        self._tokenizer: Tokenizer | None = None
        self._compiler: GrammarCompiler | None = None

    def start(self) -> None:
        """Loads the model. Blocking: seconds. Raises what `Replica.start` and `Tokenizer.load` raise."""
        assert self._replica is None, "started twice"
        replica = Replica.start(self._config, self._launcher, self._progress)
        try:
            self._tokenizer = Tokenizer.load(replica.info.path)
            self._compiler = GrammarCompiler(self._tokenizer)
            self._delivery = _Delivery(replica)
        except BaseException:  # an interrupt as well: the replica may not be left running
            replica.stop()
            raise
        self._replica = replica

    def stop(self) -> None:
        """Aborts what is running, answers everyone, and ends the replica. Safe to call twice."""
        if self._replica is not None and self._delivery is not None:
            self._replica.stop()
            self._delivery.join()
            self._replica = None

    def __enter__(self) -> "InferenceEngine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def submit_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: Priority = Priority.NORMAL,
        callback: Callback | None = None,
        tenant: str = "",
    ) -> RequestHandle:
        """Queues a request and returns at once.

        `callback` gets the whole output so far after every step that brought tokens, the last time with `finished` or
        `error` set. It runs on the delivery thread, so it should hand over and return. Raises `InvalidRequestError`,
        and `ReplicaError` if the replica has failed.
        """
        _, delivery = self._running()
        assert self._compiler is not None
        params = params or SamplingParams()
        check_controls(params, self.info.vocab_size)
        number = next(self._numbers)
        seed = derived_seed(f"{self._seed}:{number}") if params.seed is None else params.seed
        text = prompt if isinstance(prompt, str) else None
        request = EngineRequest(
            request_id=f"request-{number}",
            prompt_token_ids=tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt),
            sampling_params=replace(params, seed=seed),
            priority=priority,
            tenant=tenant,
            bad_word_token_ids=bad_word_token_ids(self.tokenizer, params.bad_words),
            grammar=self._compiler.compile(params.structure),
        )
        completion = Completion(request, text, self.tokenizer, callback)
        delivery.open(completion)
        return RequestHandle(self, completion)

    async def submit_request_async(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: Priority = Priority.NORMAL,
        tenant: str = "",
    ) -> RequestOutput:
        """The finished output. Cancelling the awaiting task aborts the request. Raises what ended it otherwise."""
        handle = await asyncio.to_thread(self.submit_request, prompt, params, priority, tenant=tenant)
        try:
            return await asyncio.shield(asyncio.wrap_future(handle.future))
        except asyncio.CancelledError:
            handle.cancel()
            raise

    def abort(self, request_id: str) -> None:
        """Ends a request within one step. Unknown ids are ignored."""
        if self._replica is not None:
            self._replica.engine.abort(request_id)

    def get_stats(self) -> EngineStats:
        """Exact counts between two steps."""
        return self._running()[0].engine.stats()

    def get_recommendations(self) -> list[Recommendation]:
        """Which settings the load so far asks to change, and why; with `auto_tune`, also what has been changed."""
        return self._running()[0].engine.recommendations()

    @property
    def info(self) -> ModelInfo:
        """Facts of the loaded model."""
        return self._running()[0].info

    @property
    def tokenizer(self) -> Tokenizer:
        self._running()
        assert self._tokenizer is not None
        return self._tokenizer

    def _running(self) -> "tuple[Replica, _Delivery]":
        if self._replica is None or self._delivery is None:
            raise RequestAbortedError("the engine is not running: call start(), or use it in a `with` block")
        return self._replica, self._delivery


def _worker_config(model: str | None, config: WorkerConfig | Mapping[str, object] | None) -> WorkerConfig:
    if not isinstance(config, WorkerConfig):
        config = load_config(mapping_layer(HoldfastConfig, config or {}, "InferenceEngine(...)")).config.worker
    if model is None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"model": model})})


class _Delivery:
    """A `StepListener` that hands the engine's updates to a thread, which turns them into text and calls back."""

    def __init__(self, replica: Replica) -> None:
        self._engine = replica.engine
        self._open: dict[str, Completion] = {}
        self._inbox: queue.SimpleQueue[EngineUpdate | HoldfastError] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="delivery", daemon=True)
        self._thread.start()
        self._engine.attach(self)

    def open(self, completion: Completion) -> None:
        """Submits a request and remembers who waits for it. Raises `ReplicaError` if the engine has ended."""
        self._open[completion.request.request_id] = completion
        try:
            self._engine.submit(completion.request, self)
        except HoldfastError:
            self._open.pop(completion.request.request_id, None)
            raise

    def join(self) -> None:
        """Waits until everyone has been answered. The engine must have ended."""
        self._thread.join()

    def on_update(self, update: EngineUpdate) -> None:
        self._inbox.put(update)

    def on_failure(self, error: HoldfastError) -> None:
        self._inbox.put(error)

    def _run(self) -> None:
        while isinstance(item := self._inbox.get(), EngineUpdate):
            self._deliver(item)
        while self._open:
            _, completion = self._open.popitem()
            completion.fail(item)

    def _deliver(self, update: EngineUpdate) -> None:
        for rejection in update.rejections:
            self._open.pop(rejection.request_id).fail(rejection.error)
        for delta in update.deltas:
            completion = self._open.get(delta.request_id)
            if completion is None:
                continue  # it ended at a stop string; the engine heard of that a step later
            self._take(completion, delta)

    def _take(self, completion: Completion, delta: TokenDelta) -> None:
        """A bug in one request's text ends that request, and no other."""
        try:
            completion.take(delta)
        except Exception as bug:
            logger.exception("request %s failed", delta.request_id)
            completion.fail(InternalError(f"turning tokens into text failed: {type(bug).__name__}: {bug}"))
        if completion.future.done():
            del self._open[delta.request_id]
            if delta.finish_reason is None:
                self._engine.abort(delta.request_id)

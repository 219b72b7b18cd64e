"""The whole system in one process, without Ray or gRPC: text in, text out, from any thread or event loop.

What may live here: making requests of prompts, and handing them to a replica. What may not: what becomes of its answers
(`delivery.py`).
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.cluster.config.config import HoldfastConfig, load_config
from holdfast.cluster.config.sources import mapping_layer
from holdfast.cluster.offline.completion import Callback, Completion
from holdfast.cluster.offline.delivery import Delivery
from holdfast.cluster.offline.outputs import RequestOutput
from holdfast.router.request import derived_seed
from holdfast.router.text.grammar import GrammarCompiler
from holdfast.router.text.prompt import echoed_text, kept_tokens
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.router.text.vocabulary import bad_word_token_ids, check_logits_settings, check_vocabulary
from holdfast.worker.config import WorkerConfig
from holdfast.worker.errors import InvalidRequestError, RequestAbortedError
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.replica.rank import RankLauncher
from holdfast.worker.replica.replica import Progress, Replica
from holdfast.worker.request import EngineRequest, Priority
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.stats import EngineStats
from holdfast.worker.tuning.batching_optimizer import Recommendation

ALONE_FROZEN_AFTER_S: Final = 60.0
"""Without a cluster, no engine is frozen before it has stood still for so long."""

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
        self._config = _patient(located(_worker_config(model, config)))
        self._seed = seed
        self._launcher = launcher
        self._progress = progress
        self._numbers = itertools.count()
        self._replica: Replica | None = None
        self._delivery: Delivery | None = None
        self._tokenizer: Tokenizer | None = None
        self._compiler: GrammarCompiler | None = None

    def start(self) -> None:
        """Loads the model. Blocking: seconds. Raises what `Replica.start` and `Tokenizer.load` raise."""
        assert self._replica is None, "started twice"
        replica = Replica.start(self._config, self._launcher, self._progress)
        try:
            self._tokenizer = Tokenizer.load(replica.info.path)
            self._compiler = GrammarCompiler(self._tokenizer)
            self._delivery = Delivery(replica)
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
        *,
        timeout_s: float | None = None,
        cache_salt: str = "",
    ) -> RequestHandle:
        """Queues a request and returns at once.

        `callback` gets the whole output so far after every step that brought tokens, the last time with `finished` or
        `error` set; with `best_of` only that last time. It runs on the delivery thread, so it should hand over and
        return. After `timeout_s` the request ends with a `DeadlineExceededError`. Only requests with the same
        `cache_salt` find each other's prefixes in the cache. Raises `InvalidRequestError`, and `ReplicaError` if the
        replica has failed.
        """
        _, delivery = self._running()
        params = params or SamplingParams()
        self._check(params)
        _check_timeout(timeout_s)
        request = replace(
            self._engine_request(prompt, params),
            priority=priority,
            tenant=tenant,
            time_left_s=timeout_s,
            cache_salt=cache_salt,
        )
        kept = request.prompt_token_ids
        given = prompt if isinstance(prompt, str) else tuple(prompt)
        echo = echoed_text(self.tokenizer, given, kept, params) if params.echo else ""
        text = prompt if isinstance(prompt, str) else None
        completion = Completion(request, text, self.tokenizer, callback, echo)
        delivery.open(completion)
        return RequestHandle(self, completion)

    async def submit_request_async(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: Priority = Priority.NORMAL,
        tenant: str = "",
        *,
        timeout_s: float | None = None,
        cache_salt: str = "",
    ) -> RequestOutput:
        """The finished output. Cancelling the awaiting task aborts the request. Raises what ended it otherwise."""
        handle = await asyncio.to_thread(
            self.submit_request, prompt, params, priority, tenant=tenant, timeout_s=timeout_s, cache_salt=cache_salt
        )
        try:
            return await asyncio.shield(asyncio.wrap_future(handle.future))
        except asyncio.CancelledError:
            handle.cancel()
            raise

    def abort(self, request_id: str) -> None:
        """Ends a request within one step. Unknown ids are ignored."""
        if self._delivery is not None:
            self._delivery.abort(request_id)

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

    @property
    def max_sequence_len(self) -> int:
        """Longest prompt plus output in tokens: the model's context, or all of the KV cache."""
        return min(self.info.max_model_len, self.info.block_size * self.info.num_blocks)

    @property
    def max_num_waiting(self) -> int:
        """Sequences that may wait at once."""
        return self._config.scheduler.max_num_waiting

    def _check(self, params: SamplingParams) -> None:
        check_logits_settings(params, self.info.vocab_size)
        if params.beam_width is not None:
            raise InvalidRequestError("sampling_params.beam_width", params.beam_width, "is for LLM.beam_search alone")
        if params.num_sequences > self.max_num_waiting:
            name = "n" if params.best_of is None else "best_of"
            limit = f"must be at most {self.max_num_waiting} (scheduler.max_num_waiting)"
            raise InvalidRequestError(f"sampling_params.{name}", params.num_sequences, limit)

    def _engine_request(self, prompt: Prompt, params: SamplingParams) -> EngineRequest:
        assert self._compiler is not None
        number = next(self._numbers)
        seed = derived_seed(f"{self._seed}:{number}") if params.seed is None else params.seed
        return EngineRequest(
            request_id=f"request-{number}",
            prompt_token_ids=self.prompt_token_ids(prompt, params),
            sampling_params=replace(params, seed=seed),
            bad_word_token_ids=bad_word_token_ids(self.tokenizer, params.bad_words),
            grammar=self._compiler.compile(params.structure),
        )

    def prompt_token_ids(self, prompt: Prompt, params: SamplingParams) -> tuple[int, ...]:
        """The tokens of a prompt that `params` leave of it. Raises `InvalidRequestError`."""
        token_ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        check_vocabulary("prompt", token_ids, self.info.vocab_size)
        return kept_tokens(token_ids, params, self.max_sequence_len)

    def _running(self) -> tuple[Replica, Delivery]:
        if self._replica is None or self._delivery is None:
            raise RequestAbortedError("the engine is not running: call start(), or use it in a `with` block")
        return self._replica, self._delivery


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidRequestError("timeout_s", timeout_s, "must be above 0")


def _patient(config: WorkerConfig) -> WorkerConfig:
    """In one process nobody is there to take over from a replica that is found frozen, or wrong: all that a hasty
    verdict could do is end a script whose machine was busy, and self-checks would only take time from it.
    """
    frozen_after_s = max(config.health.frozen_after_s, ALONE_FROZEN_AFTER_S)
    health = config.health.model_copy(update={"frozen_after_s": frozen_after_s, "self_check_every_s": 0.0})
    return config.model_copy(update={"health": health})


def _worker_config(model: str | None, config: WorkerConfig | Mapping[str, object] | None) -> WorkerConfig:
    if not isinstance(config, WorkerConfig):
        config = load_config(mapping_layer(HoldfastConfig, config or {}, "InferenceEngine(...)")).config.worker
    if model is None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"model": model})})

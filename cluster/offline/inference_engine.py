"""Inference engine in one process, without Ray or gRPC: text in, text out, from any thread or event loop."""

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, Unpack

from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.cluster.call_options import ServiceOptions, check_timeout
from holdfast.cluster.config.chat_templates import with_template_text
from holdfast.cluster.config.config import HoldfastConfig, load_config
from holdfast.cluster.config.sources import mapping_layer
from holdfast.cluster.offline.local_router import LocalRouter
from holdfast.cluster.offline.lora import LoRARequest
from holdfast.cluster.offline.outputs import RequestOutput
from holdfast.cluster.offline.request_handle import Callback, RequestHandle
from holdfast.cluster.offline.weight_folder import WeightFolder
from holdfast.router.config import LimitsConfig
from holdfast.router.dispatch.dispatch_host import DispatchHost
from holdfast.router.request import GenerationRequest
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.adapter import Adapter
from holdfast.worker.config import ModelConfig, WorkerConfig
from holdfast.worker.errors import InvalidRequestError, ReplicaError, RequestAbortedError
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.progress import Report
from holdfast.worker.replica.processes import is_forked
from holdfast.worker.replica.rank import RankLauncher
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import Priority
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.batching_optimizer import Recommendation
from holdfast.worker.step_update import EngineStats

if TYPE_CHECKING:
    from torch import Tensor

ALONE_FROZEN_AFTER_S: Final = 60.0
"""Seconds without progress after which an engine without a cluster counts as frozen."""

ResultT = TypeVar("ResultT")

Prompt = str | Sequence[int]
"""Text, or token ids."""


class InferenceEngine:
    """One replica and a router in front of it. Thread-safe. Usable as a context manager.

    `config` is a tree of settings as in a configuration file (`{"parallel": {"tensor_parallel_size": 2}}`), or a
    `HoldfastConfig`. Raises `ConfigurationError` for invalid settings. `model` and `limits` (bounds of requests)
    override the tree. A request without a timeout has no deadline.

    Same model, settings and `seed`, and the same requests in the same order, give the same outputs: a request without a
    seed gets one derived from `seed` and its number.
    """

    def __init__(
        self,
        model: str | None = None,
        config: WorkerConfig | Mapping[str, object] | None = None,
        *,
        limits: LimitsConfig | None = None,
        seed: int = 0,
        launcher: RankLauncher | None = None,
        progress: Report | None = None,
    ) -> None:
        worker_config, default_limits = _settings(model, config)
        self._config = _patient(located(worker_config))
        self._limits = limits or default_limits
        self._seed = seed
        self._launcher = launcher
        self._progress = progress
        self._numbers = itertools.count()
        self._weights: WeightFolder | None = None
        self._updating = threading.Lock()
        self._stopping = threading.Lock()
        self._num_updates = 0
        self._num_cache_resets = 0
        self._adapters: dict[tuple[str, int, str], Adapter] = {}
        self._replica: Replica | None = None
        self._pid = os.getpid()
        """Process id of the process that loaded the model: a fork of it lacks its threads."""
        self._router: LocalRouter | None = None

    def start(self) -> None:
        """Loads the model; blocks for seconds. Raises the errors of `Replica.start` and `Tokenizer.load`."""
        assert self._replica is None, "started twice"
        if is_forked():
            with ThreadPoolExecutor(1, thread_name_prefix="load") as thread:  # this one's OpenMP may lack its threads
                replica = thread.submit(Replica.start, self._config, self._launcher, self._progress).result()
        else:
            replica = Replica.start(self._config, self._launcher, self._progress)
        try:
            self._router = LocalRouter.start(replica, self._limits, max_waiting=self.max_num_waiting)
        except BaseException:  # an interrupt as well: the replica may not be left running
            replica.stop()
            raise
        self._replica, self._pid = replica, os.getpid()

    def stop(self) -> None:
        """Aborts running requests, answers their callers, and ends the replica. Safe to call twice, also at the same
        time. Without effect in a process that was forked after the model was loaded.
        """
        if self._pid != os.getpid():
            return
        with self._stopping:
            if self._replica is not None and self._router is not None:
                self._router.end_all()
                self._replica.stop()
                self._router.close()
                self._replica = self._router = None

    def __enter__(self) -> "InferenceEngine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def on_router(self, work: Callable[[RequestProcessor, DispatchHost], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Result of `work` on the event loop that serves all requests, with what serves them. Blocking."""
        return self._running()[1].run(work)

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
        cache_ttl_s: int = 0,
        request_id: str = "",
    ) -> RequestHandle:
        """Queues a request, and returns once it has been checked. `callback` gets the whole output so far after every
        step with new tokens, the last time with `finished` or `error` set; with `best_of` and `beam_width` only that
        last time. It runs on the thread that serves all requests, so it should hand over and return. After `timeout_s`
        the request ends with a `DeadlineExceededError`. Only requests with the same `cache_salt` find each other's
        prefixes in the cache; that of this one is kept there for `cache_ttl_s`. Without a `request_id` it gets the name
        `request-N`, which a caller cannot use.

        Raises `CallerError` for an invalid request, except with a callback; all later errors, and all errors with a
        callback, come by the handle. Raises why the engine has ended if it has.
        """
        router = self._running()[1]
        service: ServiceOptions = {
            "priority": priority,
            "tenant": tenant,
            "timeout_s": timeout_s,
            "cache_salt": cache_salt,
            "cache_ttl_s": cache_ttl_s,
        }
        is_awaited = not router.is_this_thread()
        request = self._request(router, prompt, params, callback, request_id, service, is_awaited=is_awaited)
        router.submit(request)
        if is_awaited:
            try:
                request.admitted.result()
            except BaseException:  # an interrupt as well: the caller has no handle
                router.cancel(request)
                raise
        return request

    def enqueue_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        callback: Callback | None = None,
        *,
        request_id: str = "",
        lora_request: LoRARequest | None = None,
        **service: Unpack[ServiceOptions],
    ) -> RequestHandle:
        """Like `submit_request`, but returns at once: errors of the request also come through the handle.

        With a `lora_request` it runs with that adapter. Raises `ConfigurationError` where its folder cannot be read.
        """
        router = self._running()[1]
        model = router.model if lora_request is None else self.model_with(lora_request)
        request = self._request(router, prompt, params, callback, request_id, service, is_awaited=False, model=model)
        router.submit(request)
        return request

    async def submit_request_async(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: Priority = Priority.NORMAL,
        tenant: str = "",
        *,
        timeout_s: float | None = None,
        cache_salt: str = "",
        cache_ttl_s: int = 0,
        request_id: str = "",
    ) -> RequestOutput:
        """The finished output. Cancelling the awaiting task aborts the request. Raises the error that ended the
        request.
        """
        handle = self.enqueue_request(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            tenant=tenant,
            timeout_s=timeout_s,
            cache_salt=cache_salt,
            cache_ttl_s=cache_ttl_s,
        )
        try:
            return await asyncio.shield(asyncio.wrap_future(handle.future))
        except asyncio.CancelledError:
            handle.cancel()
            raise

    def abort(self, request_id: str) -> None:
        """Ends a request within one step. Unknown ids are ignored. An id that the caller has given means the caller's
        request only.
        """
        if (router := self._router) is not None:
            router.abort(request_id)

    def update_weights(
        self,
        weights: "str | Path | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]",
        version: str = "",
        *,
        running: Literal["finish", "replay"] = "finish",
    ) -> str:
        """Replaces the weights without a restart; the prefix cache is dropped. Returns the version, which is part of
        the fingerprint: `update-N` if it is not given. Blocking.

        `weights` is a folder with other weights of the same model, or tensors by their names in the model's own files;
        tensors that are not given keep their values. Requests that run `finish` before, while new ones wait, or
        `replay`: they go on with the new weights after the tokens that they have. While it lasts, memory holds both
        models. Raises `InvalidRequestError` or `ConfigurationError` for weights that do not fit: the old ones stay.
        """
        from holdfast.worker.models.weights import model_folder  # here: it loads torch

        if running not in ("finish", "replay"):
            raise InvalidRequestError("running", running, "must be finish or replay")
        if not (isinstance(version, str) and version.isascii() and version.isprintable() and len(version) <= 128):
            raise InvalidRequestError("version", version, "must be up to 128 printable ASCII characters")
        router = self._running()[1]
        if router.is_this_thread():
            raise InvalidRequestError("weights", "in a callback", "must be updated on a thread that can wait")
        with self._updating:
            version = version or f"update-{self._num_updates + 1}"
            fresh = WeightFolder.of(weights, self._weights or WeightFolder(model_folder(self._config.model)))
            router.update_weights(str(fresh.path), version, replay=running == "replay")
            self._weights, self._num_updates = fresh, self._num_updates + 1
        return version

    def reset_prefix_cache(self) -> None:
        """New requests find no cached prefix of earlier ones, because the salt of block hashes changes. Old blocks stay
        until they are evicted.
        """
        self._running()
        self._num_cache_resets += 1

    def get_stats(self) -> EngineStats:
        """Exact counts between two steps."""
        return self._running()[0].engine.stats()

    def get_recommendations(self) -> list[Recommendation]:
        """Recommended changes of settings for the load so far, with reasons; with `auto_tune`, also the changes
        made.
        """
        return self._running()[0].engine.recommendations()

    @property
    def info(self) -> ModelInfo:
        """Facts of the loaded model."""
        return self._running()[0].info

    @property
    def model_config(self) -> ModelConfig:
        """Settings of the loaded model, with the folder, maximum length and dtype that were resolved."""
        found = {"max_model_len": self.info.max_model_len, "dtype": self.info.dtype}
        return self._config.model.model_copy(update=found)

    def get_tokenizer(self) -> Tokenizer:
        """Same as `tokenizer`."""
        return self.tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the engine's model. Raises `HoldfastError` if the engine does not run."""
        return self._running()[1].tokenizer

    @property
    def max_sequence_len(self) -> int:
        """Longest prompt plus output in tokens: the model's context, or all of the KV cache."""
        return self.info.max_sequence_len

    @property
    def max_num_waiting(self) -> int:
        """Sequences that may wait at once."""
        return self._config.scheduler.max_num_waiting

    def _request(
        self,
        router: LocalRouter,
        prompt: Prompt,
        params: SamplingParams | None,
        callback: Callback | None,
        request_id: str,
        service: ServiceOptions,
        *,
        is_awaited: bool,
        model: str = "",
    ) -> RequestHandle:
        if callback is not None and not callable(callback):
            raise InvalidRequestError("callback", callback, "must be a function of one argument")
        number = next(self._numbers)
        request = GenerationRequest(
            prompt=prompt,  # type: ignore[arg-type]  # it becomes a tuple there
            model=model or router.model,
            request_id=request_id,
            sampling_params=SamplingParams() if params is None else params,
            seed_key=f"{self._seed}:{number}",
            **service,
        )
        if request.timeout_s is not None:
            check_timeout(request.timeout_s)
        if self._num_cache_resets:
            request = replace(request, cache_salt=f"{self._num_cache_resets}:{request.cache_salt}")
        name = request_id or f"request-{number}"
        return RequestHandle(request, router.tokenizer, router.cancel, callback, name=name, is_awaited=is_awaited)

    def bare_request(self, **fields: Any) -> GenerationRequest:
        """A request for the model without a prompt, with the caller's priority, tenant and timeout."""
        fields["seed_key"] = f"{self._seed}:{next(self._numbers)}"
        if self._num_cache_resets:
            fields["cache_salt"] = f"{self._num_cache_resets}:{fields.get('cache_salt', '')}"
        return GenerationRequest(model=self._running()[1].model, **fields)

    def model_with(self, lora: LoRARequest | None) -> str:
        """The name by which the model runs with this adapter. Raises `ConfigurationError` where it cannot be read."""
        replica, router = self._running()
        if lora is None:
            return router.model
        if not self._config.model.serves_adapters:
            limit = "must not be set: the engine was made without enable_lora=True"
            raise InvalidRequestError("lora_request", lora.lora_name, limit)
        key = (lora.lora_name, lora.lora_int_id, lora.lora_path)
        adapter = None if lora.load_inplace else self._adapters.get(key)
        if adapter is None:
            adapter = replica.read_adapter(lora.lora_name, lora.lora_path, replaces=lora.load_inplace)
            self._adapters[key] = adapter
            router.add_adapter(adapter)
        return adapter.key

    def _running(self) -> tuple[Replica, LocalRouter]:
        if self._replica is None or self._router is None:
            raise RequestAbortedError("the engine is not running: call start(), or use it in a `with` block")
        if self._pid != os.getpid():
            raise ReplicaError(
                "this process was forked after the model was loaded, and lacks its threads: load the model here, or "
                "use multiprocessing.get_context('spawn')"
            )
        return self._replica, self._router


def _patient(config: WorkerConfig) -> WorkerConfig:
    """The config with late freeze detection and no self-checks. In one process no other replica could take over: an
    early verdict would only end a script on a busy machine, and self-checks would only take its time.
    """
    frozen_after_s = max(config.health.frozen_after_s, ALONE_FROZEN_AFTER_S)
    health = config.health.model_copy(update={"frozen_after_s": frozen_after_s, "self_check_every_s": 0.0})
    return config.model_copy(update={"health": health})


def _settings(
    model: str | None, config: WorkerConfig | Mapping[str, object] | None
) -> tuple[WorkerConfig, LimitsConfig]:
    limits = LimitsConfig()
    if not isinstance(config, WorkerConfig):
        whole = load_config(mapping_layer(HoldfastConfig, config or {}, "InferenceEngine(...)")).config
        config, limits = whole.worker, whole.limits
    found = with_template_text(config.model)
    if model is not None:
        found = found.model_copy(update={"model": model})
    return config.model_copy(update={"model": found}), limits

"""vLLM's engines for single requests, `AsyncLLMEngine` and `LLMEngine`, on top of `LLM`; and arguments of `LLM` as a
value, `EngineArgs`, also from a command line.
"""

import asyncio
import json
import queue
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Iterable
from copy import copy
from dataclasses import asdict, field, make_dataclass, replace
from functools import partial
from typing import Any, Final, Self

from holdfast.cluster.offline.calls import PromptInput, check_unused, prompt_list, requests_of
from holdfast.cluster.offline.chat_tokenizer import ChatTokenizer
from holdfast.cluster.offline.engine_args import DEFAULTS, WITHOUT_EFFECT
from holdfast.cluster.offline.llm import LLM
from holdfast.cluster.offline.outputs import CompletionOutput, RequestOutput
from holdfast.cluster.offline.request_handle import RequestHandle
from holdfast.cluster.offline.vllm_methods import Metric, Refused
from holdfast.worker.errors import HoldfastError, InvalidRequestError
from holdfast.worker.request import Priority
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.value_types import RequestOutputKind

_SWITCHES: Final = {"async_scheduling", "enable_prefix_caching"} | WITHOUT_EFFECT
"""They may stand on a command line without a value."""

_SHORT: Final = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp"}

_LOOK_S: Final = 0.05


class _Methods:
    def arguments(self) -> dict[str, Any]:
        """Arguments of `LLM(...)`: the ones that differ from the defaults."""
        return {name: value for name, value in asdict(self).items() if value != DEFAULTS[name]}  # type: ignore[call-overload]  # a dataclass is made of it

    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> ArgumentParser:
        """Adds a flag for each argument (`--max-model-len`), and `--no-...` for each switch. Returns the parser."""
        for name, default in DEFAULTS.items():
            _add_flag(parser, name, default)
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> Self:
        """Made from a parser's result. Flags of other programs are left out."""
        return cls(**{name: value for name, value in vars(args).items() if name in DEFAULTS})


def _add_flag(parser: ArgumentParser, name: str, default: object) -> None:
    flag = name.replace("_", "-")
    flags = [*([_SHORT[name]] if name in _SHORT else []), f"--{flag}", *([f"--{name}"] if name != flag else [])]
    is_switch = name in _SWITCHES or isinstance(default, bool)
    optional: dict[str, Any] = {"nargs": "?", "const": True} if is_switch else {}
    parser.add_argument(
        *flags, dest=name, default=default, type=str if isinstance(default, str) else _value, **optional
    )
    if is_switch:
        parser.add_argument(f"--no-{flag}", dest=name, action="store_const", const=False, default=default)


def _value(text: str) -> object:
    """Numbers, switches and mappings as JSON, other values as text."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _fields() -> list[tuple[str, Any, Any]]:
    return [(name, Any, field(default_factory=partial(copy, value))) for name, value in DEFAULTS.items()]


class EngineArgs(make_dataclass("_EngineArgs", _fields(), bases=(_Methods,))):  # type: ignore[misc]  # made of a table
    """Arguments of `LLM(...)` as one value; they are checked when a model is loaded."""


class AsyncEngineArgs(EngineArgs):
    """The same: there is one engine for both."""


class _Engine(Refused):
    def __init__(self, engine_args: EngineArgs) -> None:
        self._llm = LLM.from_engine_args(engine_args)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: object) -> Self:
        """Loads the model. vLLM's further arguments (`usage_context`, `stat_loggers`, ...) change nothing here. Raises
        what `LLM(...)` raises.
        """
        return cls(engine_args)

    def get_tokenizer(self) -> ChatTokenizer:
        """Same as `LLM.get_tokenizer`."""
        return self._llm.get_tokenizer()

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The same."""
        return self.get_tokenizer()

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the engine and its ranks; requests that run are aborted. Safe to call twice."""
        self._llm.close()


class AsyncLLMEngine(_Engine):
    """Streams single requests to coroutines."""

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: Priority | int = 0,
        **unused: object,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they grow, cumulative or as deltas by `sampling_params.output_kind`. Leaving the loop aborts the
        request. Raises the error that ended the request, and `InvalidRequestError` for unsupported arguments of vLLM's.
        """
        check_unused(**unused)
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[RequestOutput] = asyncio.Queue()

        def arrive(output: RequestOutput) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, output)

        handle = _submitted(self._llm, request_id, prompt, sampling_params, priority, arrive)
        before: RequestOutput | None = None
        try:
            while before is None or not before.finished:
                output = await arrived.get()
                if output.error is not None:
                    raise output.error
                if (shown := _shown(output, before, sampling_params.wanted_output_kind)) is not None:
                    yield shown
                before = output
        finally:
            handle.cancel()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests within one step. Unknown ids are ignored."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            self._llm.engine.abort(one)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Same as `LLM.reset_prefix_cache`."""
        return self._llm.reset_prefix_cache(reset_running_requests, reset_connector)

    async def reset_mm_cache(self) -> None:
        """Nothing to do: models take only text."""

    async def reset_encoder_cache(self) -> None:
        """Nothing to do: models take only text."""

    async def is_sleeping(self) -> bool:
        """False: an engine never sleeps here."""
        return False

    async def is_paused(self) -> bool:
        """False: generation is never paused."""
        return False

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait or run."""
        return _num_unfinished(self._llm)

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Returns when no request waits or runs. Raises `TimeoutError` after `drain_timeout` seconds."""
        async with asyncio.timeout(drain_timeout):
            while _num_unfinished(self._llm):
                await asyncio.sleep(_LOOK_S)

    @property
    def is_running(self) -> bool:
        """Whether it takes requests."""
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        """Whether it has ended."""
        return self.errored

    @property
    def errored(self) -> bool:
        """The same."""
        try:
            self._llm.get_stats()
        except HoldfastError:
            return True
        return False

    async def do_log_stats(self) -> None:
        """Does nothing: `LLM.get_stats` has the counts."""

    async def is_tracing_enabled(self) -> bool:
        """There are no traces within one process."""
        return False

    async def check_health(self) -> None:
        """Raises why the engine has ended if it has."""
        self._llm.get_stats()


class LLMEngine(_Engine):
    """Adds single requests, and steps to their outputs."""

    def __init__(self, engine_args: EngineArgs) -> None:
        super().__init__(engine_args)
        self._arrived: queue.Queue[tuple[str, RequestOutput]] = queue.Queue()
        self._running: dict[str, tuple[SamplingParams, RequestOutput | None]] = {}

    def add_request(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams,
        *,
        priority: Priority | int = 0,
        **unused: object,
    ) -> str:
        """Submits a request and returns its id. Errors of the request are raised by `step`."""
        check_unused(**unused)
        if request_id in self._running:
            raise InvalidRequestError("request_id", request_id, "must not be that of a request that runs")

        def arrive(output: RequestOutput) -> None:
            self._arrived.put((request_id, output))

        _submitted(self._llm, request_id, prompt, params, priority, arrive)
        self._running[request_id] = params, None
        return request_id

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """Ends requests within one step. Unknown ids are ignored."""
        for one in request_ids:
            self._llm.engine.abort(one)

    def has_unfinished_requests(self) -> bool:
        """Whether outputs are still to come."""
        return bool(self._running)

    def get_num_unfinished_requests(self) -> int:
        """Requests of which outputs are still to come."""
        return len(self._running)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Same as `LLM.reset_prefix_cache`."""
        return self._llm.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """There is none: models take text alone."""

    def reset_encoder_cache(self) -> None:
        """There is none: models take text alone."""

    def is_sleeping(self) -> bool:
        """False: an engine never sleeps here."""
        return False

    def get_metrics(self) -> list[Metric]:
        """Same as `LLM.get_metrics`."""
        return self._llm.get_metrics()

    def do_log_stats(self) -> None:
        """Does nothing: `get_metrics` has the counts."""

    def step(self) -> list[RequestOutput]:
        """Waits for the next output of any request. Raises the error that ended a request. Empty if no request runs."""
        if not self._running:
            return []
        name, output = self._arrived.get()
        params, before = self._running[name]
        if output.finished or output.error is not None:
            del self._running[name]
        else:
            self._running[name] = params, output
        if output.error is not None:
            raise output.error
        shown = _shown(output, before, params.wanted_output_kind)
        return [] if shown is None else [shown]


def _num_unfinished(llm: LLM) -> int:
    stats = llm.get_stats()
    return stats.num_waiting + stats.num_running


def _submitted(
    llm: LLM, request_id: str, prompt: PromptInput, params: SamplingParams, priority: Priority | int, callback: object
) -> RequestHandle:
    given = prompt_list(prompt)
    if len(given) != 1:
        raise InvalidRequestError("prompt", len(given), "must be one")
    (request,) = requests_of(given, [params], priority, {})
    return llm.engine.enqueue_request(given[0].prompt, params, callback, request_id=request_id, **request.options)  # type: ignore[arg-type]  # it is checked there


def _shown(output: RequestOutput, before: RequestOutput | None, kind: RequestOutputKind) -> RequestOutput | None:
    """The part of an output that its request wants to see; None for nothing yet."""
    if kind is RequestOutputKind.FINAL_ONLY:
        return output if output.finished else None
    if kind is RequestOutputKind.CUMULATIVE or before is None:
        return output
    seen = {one.index: one for one in before.outputs}
    return replace(output, outputs=[_delta(one, seen.get(one.index)) for one in output.outputs])


def _delta(output: CompletionOutput, before: CompletionOutput | None) -> CompletionOutput:
    if before is None:
        return output
    num_seen = len(before.token_ids)
    logprobs = None if output.logprobs is None else output.logprobs[num_seen:]
    text, token_ids = output.text[len(before.text) :], output.token_ids[num_seen:]
    return replace(output, text=text, token_ids=token_ids, logprobs=logprobs)

"""vLLM's `LLM` methods besides generation: methods that work or are refused by name, metrics, and the sampling
parameters that a model's folder suggests.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.worker.errors import ConfigurationError, InvalidRequestError
from holdfast.worker.sampling_params import PARAMETERS, SamplingParams
from holdfast.worker.step_update import EngineStats


def refused(name: str, reason: str) -> Callable[..., NoReturn]:
    """A method that takes any arguments, and raises `InvalidRequestError`."""

    def refuse(self: object, *_: object, **__: object) -> NoReturn:
        raise InvalidRequestError(name, "called", f"is not supported: {reason}")

    refuse.__name__, refuse.__doc__ = name, f"Refused: {reason}."
    return refuse


_NO_CODE: Final = "ranks run no code of callers; update_weights() brings them other weights"
_NO_PROFILER: Final = "there is no profiler inside; get_stats() and get_metrics() have counts and times"
_OWN_ADAPTERS: Final = "adapters come with lora_request; the least recently used leaves memory for a new one"
_OWN_UPDATE: Final = "update_weights() takes a folder or tensors, in one call"


class Refused:
    """vLLM's methods for unsupported features."""

    sleep = refused("sleep", "close() frees the memory of weights and KV cache; another LLM loads them again")
    wake_up = refused("wake_up", "an engine never sleeps here")
    release_kv_cache_memory = refused("release_kv_cache_memory", "close() frees it with the model")
    start_profile = refused("start_profile", _NO_PROFILER)
    stop_profile = refused("stop_profile", "no profile was started")
    collective_rpc = refused("collective_rpc", _NO_CODE)
    apply_model = refused("apply_model", _NO_CODE)
    encode = refused("encode", "embed(), classify() and score() imply the task")
    reward = refused("reward", "classify() gives the scores of a reward model's head")
    add_lora = refused("add_lora", "give lora_request to generate: an adapter is loaded with its first request")
    remove_lora = refused("remove_lora", _OWN_ADAPTERS)
    pin_lora = refused("pin_lora", _OWN_ADAPTERS)
    list_loras = refused("list_loras", _OWN_ADAPTERS)
    init_weight_transfer_engine = refused("init_weight_transfer_engine", _OWN_UPDATE)
    start_weight_update = refused("start_weight_update", _OWN_UPDATE)
    start_draft_weight_update = refused("start_draft_weight_update", _OWN_UPDATE)
    finish_weight_update = refused("finish_weight_update", _OWN_UPDATE)
    update_weight_version = refused("update_weight_version", _OWN_UPDATE)
    get_weight_version = refused("get_weight_version", _OWN_UPDATE)
    shutdown_weight_transfer_engine = refused("shutdown_weight_transfer_engine", _OWN_UPDATE)
    set_weight_version = refused("set_weight_version", _OWN_UPDATE)
    compute_weight_checksums = refused("compute_weight_checksums", "replicas check their weights by known answers")
    from_vllm_config = refused("from_vllm_config", "from_engine_args() takes all arguments")
    pause_generation = refused("pause_generation", "requests wait while update_weights() runs")
    resume_generation = refused("resume_generation", "generation is never paused")
    scale_elastic_ep = refused("scale_elastic_ep", "the number of ranks is that of the start")


class VllmMethods(Refused):
    """Methods that need the engine alone."""

    _engine: InferenceEngine

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Requests from now on find no prefix that an earlier request has left. Its blocks go as others need them."""
        _refuse_if(reset_running_requests, "reset_running_requests", "running requests keep their cached blocks")
        _refuse_if(reset_connector, "reset_connector", "there are no KV connectors")
        self._engine.reset_prefix_cache()
        return True

    def reset_mm_cache(self) -> None:
        """Nothing to do: models take only text."""

    def get_world_size(self, include_dp: bool = True) -> int:
        """Ranks of the tensor-parallel group."""
        return self._engine.info.tensor_parallel_size


def _refuse_if(value: object, name: str, reason: str) -> None:
    if value:
        raise InvalidRequestError(name, value, f"must not be set: {reason}")


PREFIX: Final = "vllm:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """A value that only grows."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """A value that goes up and down."""

    value: float


def metrics_of(stats: EngineStats, model: str) -> list[Metric]:
    """Counters and gauges under vLLM's names."""
    labels = {"model_name": model}
    counters = [Counter(name=PREFIX + name, labels=labels, value=value) for name, value in _counts(stats)]
    gauges = [Gauge(name=PREFIX + name, labels=labels, value=value) for name, value in _levels(stats)]
    return [*gauges, *counters]


def _counts(stats: EngineStats) -> Iterator[tuple[str, int]]:
    yield "prompt_tokens", stats.num_prefix_query_tokens
    yield "generation_tokens", stats.num_tokens_generated
    yield "prefix_cache_queries", stats.num_prefix_query_tokens
    yield "prefix_cache_hits", stats.num_prefix_hit_tokens
    yield "num_preemptions", stats.num_preemptions
    yield "request_success", stats.num_finished
    yield "spec_decode_num_draft_tokens", stats.num_draft_tokens
    yield "spec_decode_num_accepted_tokens", stats.num_accepted_tokens


def _levels(stats: EngineStats) -> Iterator[tuple[str, float]]:
    yield "num_requests_running", stats.num_running
    yield "num_requests_waiting", stats.num_waiting
    yield "kv_cache_usage_perc", stats.num_used_blocks / max(1, stats.num_total_blocks)


_MAX_TOKENS: Final = "max_new_tokens"
"""The one parameter that has another name here."""


def default_params(folder: Path, source: str, overrides: Mapping[str, object]) -> SamplingParams:
    """`source`: `auto` is the model's `folder`, `vllm` is nothing, anything else another folder.

    Raises `ConfigurationError` for a file that cannot be read, and `InvalidRequestError` for a value in it.
    """
    wanted = dict[str, object]() if source == "vllm" else _read(folder if source == "auto" else Path(source))
    wanted |= overrides
    given = PARAMETERS.drawn_by(wanted)
    if wanted.get(_MAX_TOKENS) is not None:
        given["max_tokens"] = wanted[_MAX_TOKENS]
    return SamplingParams(**given)  # type: ignore[arg-type]  # they are checked there


def _read(folder: Path) -> dict[str, object]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    return dict(content) if isinstance(content, Mapping) else {}

"""Methods of vLLM's `LLM` that scripts call: they work here, or refuse by name."""

from typing import NoReturn

from holdfast.cluster.offline.inference_engine import InferenceEngine
from holdfast.worker.errors import InvalidRequestError


class VllmMethods:
    """What needs no more than the engine."""

    _engine: InferenceEngine

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Requests from now on find no prefix that an earlier request has left. Its blocks go as others need them."""
        _refuse_if(reset_running_requests, "reset_running_requests", "requests that run keep what they have found")
        _refuse_if(reset_connector, "reset_connector", "there are no KV connectors")
        self._engine.reset_prefix_cache()
        return True

    def reset_mm_cache(self) -> None:
        """There is none: models take text alone."""

    def get_world_size(self, include_dp: bool = True) -> int:
        """Ranks of the tensor-parallel group."""
        return self._engine.info.tensor_parallel_size

    def sleep(self, level: int = 1, mode: str = "abort") -> NoReturn:
        """Refused."""
        _refuse("sleep", "close() frees the memory of weights and KV cache; another LLM loads them again")

    def wake_up(self, tags: list[str] | None = None) -> NoReturn:
        """Refused, as `sleep` is."""
        _refuse("wake_up", "an engine never sleeps here")

    def release_kv_cache_memory(self) -> NoReturn:
        """Refused."""
        _refuse("release_kv_cache_memory", "close() frees it with the model")

    def start_profile(self, profile_prefix: str | None = None, **_: object) -> NoReturn:
        """Refused."""
        _refuse("start_profile", "there is no profiler inside; get_stats() and get_metrics() have counts and times")

    def stop_profile(self) -> NoReturn:
        """Refused, as `start_profile` is."""
        _refuse("stop_profile", "no profile was started")

    def collective_rpc(self, method: object, *_: object, **__: object) -> NoReturn:
        """Refused."""
        _refuse("collective_rpc", "ranks run no code of callers; update_weights() brings them other weights")

    def apply_model(self, func: object) -> NoReturn:
        """Refused."""
        _refuse("apply_model", "ranks run no code of callers; update_weights() brings them other weights")


def _refuse_if(value: object, name: str, reason: str) -> None:
    if value:
        raise InvalidRequestError(name, value, f"must not be set: {reason}")


def _refuse(name: str, reason: str) -> NoReturn:
    raise InvalidRequestError(name, "called", f"is not supported: {reason}")

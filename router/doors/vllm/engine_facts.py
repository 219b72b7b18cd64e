"""What vLLM's engine protocol tells of a model, an engine and its load.

What may live here: reading a model's folder for what only this protocol tells, and rates. What may not: requests.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

from holdfast.foreign import vllm_engine_pb2
from holdfast.worker.errors import HoldfastError
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.request import EngineLoad
from holdfast.worker.stats import EngineStats

SERVER_TYPE: Final = "vllm-grpc"
"""The name of the protocol, by which gateways know it."""

RATE_WINDOW_S: Final = 2.0

_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class MeasuredEngine(Protocol):
    """An engine in this process."""

    @property
    def load(self) -> EngineLoad: ...

    @property
    def failure(self) -> HoldfastError | None: ...

    def stats(self, timeout_s: float = ...) -> EngineStats:
        """Waits for the next step to end."""


def model_info(facts: ModelInfo) -> vllm_engine_pb2.GetModelInfoResponse:
    """Reads the model's folder for what the router does not need to know."""
    config, defaults = _json(facts.path, "config.json"), _json(facts.path, "generation_config.json")
    chosen = {name: defaults[name] for name in _DEFAULTS if defaults.get(name) is not None}
    return vllm_engine_pb2.GetModelInfoResponse(
        model_path=facts.path,
        is_generation=True,
        max_context_length=facts.max_model_len,
        vocab_size=facts.vocab_size,
        served_model_name=facts.model,
        tokenizer_path=facts.path,
        model_type=facts.model_type,
        architectures=config.get("architectures") or (),
        eos_token_ids=sorted(facts.eos_token_ids),
        pad_token_id=config.get("pad_token_id") or 0,
        bos_token_id=config.get("bos_token_id") or 0,
        max_req_input_len=facts.max_sequence_len,
        default_sampling_params_json=json.dumps(chosen, separators=(",", ":")) if chosen else "",
    )


def _json(folder: str, name: str) -> Mapping[str, Any]:
    path = Path(folder) / name
    content = json.loads(path.read_text()) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


class LoadReport:
    """Makes reports of one engine's load. Rates are those since an earlier report, at least `RATE_WINDOW_S` ago."""

    def __init__(self, facts: ModelInfo, max_num_seqs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._facts = facts
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()

    def of(self, load: EngineLoad, stats: EngineStats) -> vllm_engine_pb2.SchedulerLoad:
        """Only what runs occupies blocks here: cached ones that can be had at any time are no use."""
        num_used = load.num_total_blocks - load.num_free_blocks
        return vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=load.num_running,
            num_waiting_reqs=load.num_waiting,
            num_total_reqs=load.num_running + load.num_waiting,
            num_used_tokens=num_used * self._facts.block_size,
            max_total_num_tokens=load.num_total_blocks * self._facts.block_size,
            token_usage=num_used / max(1, load.num_total_blocks),
            gen_throughput=self._tokens_per_s(stats.num_tokens_generated),
            cache_hit_rate=stats.prefix_hit_rate,
            utilization=load.num_running / self._max_num_seqs,
            max_running_requests=self._max_num_seqs,
            num_waiting_uncached_tokens=load.num_waiting_tokens,
        )

    def _tokens_per_s(self, num_tokens: int) -> float:
        now = self._clock()
        self._samples.append((now, num_tokens))
        while len(self._samples) > 2 and now - self._samples[1][0] >= RATE_WINDOW_S:
            self._samples.popleft()
        began, num_before = self._samples[0]
        return (num_tokens - num_before) / (now - began) if now > began else 0.0


def timestamp() -> str:
    """Of now, in the form of ISO 8601."""
    return datetime.now(UTC).isoformat()

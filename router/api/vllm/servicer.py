"""vLLM's engine protocol (`vllm.grpc.engine.VllmEngine`) over the router's pipeline,
for gateways that drive engines.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Protocol

from holdfast.foreign import vllm_engine_pb2
from holdfast.foreign import vllm_engine_pb2 as pb
from holdfast.router.api.grpc.handlers import Context
from holdfast.router.api.grpc.interceptors import given_request_id
from holdfast.router.api.intake import DecodeWorker
from holdfast.router.api.vllm.generate import GenerateResponses, generation_request
from holdfast.router.requests.request_processor import RequestProcessor
from holdfast.worker.errors import HoldfastError
from holdfast.worker.model_info import ModelInfo
from holdfast.worker.request import EngineLoad
from holdfast.worker.sampling_params import PARAMETERS
from holdfast.worker.step_update import EngineStats

SERVER_TYPE: Final = "vllm-grpc"
"""The name of the protocol, by which gateways know it."""

RATE_WINDOW_S: Final = 2.0


class MeasuredEngine(Protocol):
    """An engine in this process."""

    @property
    def load(self) -> EngineLoad: ...

    @property
    def failure(self) -> HoldfastError | None: ...

    def stats(self, timeout_s: float = ...) -> EngineStats:
        """Waits for the next step to end."""


def model_info(facts: ModelInfo) -> vllm_engine_pb2.GetModelInfoResponse:
    """Reads the facts of the model's folder that the router does not need."""
    config, defaults = _json(facts.path, "config.json"), _json(facts.path, "generation_config.json")
    chosen = PARAMETERS.drawn_by(defaults)
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
        """Only running requests occupy blocks here: cached blocks can be evicted at any time."""
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
    """The current time in ISO 8601."""
    return datetime.now(UTC).isoformat()


SERVICE: Final = pb.DESCRIPTOR.services_by_name["VllmEngine"]


class VllmEngineServicer:
    """Servicer of one engine. Errors are raised as `HoldfastError`."""

    def __init__(
        self,
        request_processor: RequestProcessor,
        engine: MeasuredEngine,
        facts: ModelInfo,
        max_num_seqs: int,
        decode_worker: DecodeWorker | None = None,
    ) -> None:
        """Large messages are decoded by the `decode_worker`, or by a separate one."""
        self._decode_worker = decode_worker or DecodeWorker()
        self._request_processor = request_processor
        self._engine = engine
        self._facts = facts
        self._max_num_seqs = max_num_seqs
        self._report = LoadReport(facts, max_num_seqs)
        self._started_s = time.monotonic()
        self._last_request_at = 0.0

    async def Generate(
        self, message: pb.GenerateRequest, context: Context
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Streams vLLM's chunks, or one `complete` message where the client asks for no stream."""
        self._last_request_at = time.time()
        made = partial(generation_request, message, given_request_id(context))
        request = await self._decode_worker.run(message.ByteSize(), made)
        request.check_streamable()
        async with self._request_processor.open(request, context.time_remaining()) as answer:
            responses = GenerateResponses(answer.request.prompt_token_ids, stream=message.stream)
            if not message.stream:
                for whole in await answer.outputs():
                    for response in responses.of(whole):
                        yield response
                return
            async for delta in answer:
                for response in responses.of(delta):
                    yield response

    async def HealthCheck(self, message: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        failure = self._engine.failure
        if failure is None and self._request_processor.is_closed:
            return pb.HealthCheckResponse(healthy=False, message="the replica is stopping")
        return pb.HealthCheckResponse(healthy=failure is None, message="" if failure is None else str(failure))

    async def Abort(self, message: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ids that are not open are passed over."""
        for request_id in filter(None, message.request_ids):
            self._request_processor.abort(request_id)
        return pb.AbortResponse()

    async def GetModelInfo(self, message: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        return await asyncio.to_thread(model_info, self._facts)

    async def GetServerInfo(self, message: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        load = self._engine.load
        return pb.GetServerInfoResponse(
            active_requests=load.num_running + load.num_waiting,
            is_paused=self._request_processor.is_closed,
            last_receive_timestamp=self._last_request_at,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            block_size=self._facts.block_size,
            model_dtype=f"torch.{self._facts.dtype}",
            max_num_seqs=self._max_num_seqs,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, message: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        stats = await asyncio.to_thread(self._engine.stats)
        loads = [self._report.of(self._engine.load, stats)]
        return pb.GetLoadsResponse(timestamp=timestamp(), version=_version(), dp_rank_count=len(loads), loads=loads)


def _version() -> str:
    try:
        return version("holdfast")
    except PackageNotFoundError:
        return "a checkout that is not installed"

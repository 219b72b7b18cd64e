"""Server and model metadata of the Open Inference Protocol: the served models, and the tensors of a request and an
answer.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from holdfast.foreign import grpc_service_pb2, model_config_pb2
from holdfast.router.api.open_inference.infer_request import INPUTS, OUTPUTS, TEXT_INPUT, VERSION
from holdfast.router.events import ModelStatus

PLATFORM: Final = "holdfast"
EXTENSIONS: Final = ("model_configuration", "parameters", "schedule_policy", "statistics")

_DATA_TYPES: Final = {"BYTES": "TYPE_STRING", "BOOL": "TYPE_BOOL", "UINT32": "TYPE_UINT32", "FP32": "TYPE_FP32"}
_LENGTHS: Final = {"num_input_tokens": 1}
"""Lengths of outputs that do not have one element for each completion."""


def server_metadata() -> grpc_service_pb2.ServerMetadataResponse:
    return grpc_service_pb2.ServerMetadataResponse(name=PLATFORM, version=_version(), extensions=EXTENSIONS)


def model_metadata(model: ModelStatus) -> grpc_service_pb2.ModelMetadataResponse:
    """Answer to `ModelMetadata`: tensors of a model, their types and shapes."""
    tensor = grpc_service_pb2.ModelMetadataResponse.TensorMetadata
    return grpc_service_pb2.ModelMetadataResponse(
        name=model.name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[tensor(name=name, datatype=datatype.name, shape=[1]) for name, datatype in INPUTS.items()],
        outputs=[
            tensor(name=name, datatype=datatype.name, shape=[_LENGTHS.get(name, -1)])
            for name, datatype in OUTPUTS.items()
        ],
    )


def model_config(model: ModelStatus) -> model_config_pb2.ModelConfig:
    """Answer to `ModelConfig`, in Triton's form."""
    facts = model.facts
    said = {"max_model_len": facts.max_model_len, "vocab_size": facts.vocab_size, "fingerprint": facts.fingerprint}
    return model_config_pb2.ModelConfig(
        name=model.name,
        platform=PLATFORM,
        backend=PLATFORM,
        max_batch_size=0,
        input=[
            model_config_pb2.ModelInput(
                name=name, data_type=_DATA_TYPES[datatype.name], dims=[1], optional=name != TEXT_INPUT
            )
            for name, datatype in INPUTS.items()
        ],
        output=[
            model_config_pb2.ModelOutput(name=name, data_type=_DATA_TYPES[datatype.name], dims=[_LENGTHS.get(name, -1)])
            for name, datatype in OUTPUTS.items()
        ],
        parameters={name: model_config_pb2.ModelParameter(string_value=str(value)) for name, value in said.items()},
        model_transaction_policy=model_config_pb2.ModelTransactionPolicy(decoupled=True),
    )


def _version() -> str:
    try:
        return version("holdfast")
    except PackageNotFoundError:
        return "unknown"


@dataclass(slots=True)
class _Count:
    """Number of events, and their total duration."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    @property
    def message(self) -> grpc_service_pb2.StatisticDuration:
        return grpc_service_pb2.StatisticDuration(count=self.count, ns=self.ns)


@dataclass(slots=True)
class _ModelCounts:
    success: _Count = field(default_factory=_Count)
    fail: _Count = field(default_factory=_Count)
    cancel: _Count = field(default_factory=_Count)
    last_inference_ms: int = 0


class InferCounts:
    """Requests by model and result: succeeded, failed, cancelled."""

    def __init__(
        self, clock_ns: Callable[[], int] = time.monotonic_ns, wall_clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._clock_ns = clock_ns
        self._wall_clock_ns = wall_clock_ns
        self._models: defaultdict[str, _ModelCounts] = defaultdict(_ModelCounts)

    @contextmanager
    def counting(self, model: str) -> Iterator[None]:
        """Counts one request of a model that is served, by how the context is left."""
        counts, began_ns = self._models[model], self._clock_ns()
        counts.last_inference_ms = self._wall_clock_ns() // 1_000_000
        end = counts.fail
        try:
            yield
            end = counts.success
        except (asyncio.CancelledError, GeneratorExit):
            end = counts.cancel
            raise
        finally:
            end.add(self._clock_ns() - began_ns)

    def message(self, model: str, num_steps: int) -> grpc_service_pb2.ModelStatistics:
        """`num_steps` are those of the model's replicas."""
        counts = self._models.get(model, _ModelCounts())
        response = grpc_service_pb2.InferResponseStatistics(cancel=counts.cancel.message)
        return grpc_service_pb2.ModelStatistics(
            name=model,
            version=VERSION,
            last_inference=counts.last_inference_ms,
            inference_count=counts.success.count,
            execution_count=num_steps,
            inference_stats=grpc_service_pb2.InferStatistics(success=counts.success.message, fail=counts.fail.message),
            response_stats={"cancelled": response} if counts.cancel.count else {},
        )

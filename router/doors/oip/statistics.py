"""Inference statistics of the Open Inference Protocol: what became of the requests of each model at this door.

What may live here: counts since the router's start. What may not: what replicas count of themselves
(`worker/stats.py`).
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from holdfast.foreign import grpc_service_pb2
from holdfast.router.doors.oip.infer_request import VERSION


@dataclass(slots=True)
class _Count:
    """How often something happened, and how long it took altogether."""

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
    """Requests by model: those that succeeded, failed and were cancelled."""

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

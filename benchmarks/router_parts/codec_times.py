"""Times of the link's codec alone: writing and reading one step's message, per delta."""

import time
from collections.abc import Callable, Iterator

from benchmarks.router_parts.load import token_at
from holdfast.v1 import engine_pb2
from holdfast.worker.request import AttemptKey, EngineLoad, TokenDelta
from holdfast.worker.step_update import StepUpdate
from holdfast.worker.wire.link_responses import (
    read_response,
    step_messages,
)

REPEATS = 200


def codec_times(num_deltas: int) -> Iterator[tuple[str, float]]:
    """Microseconds for each delta, at both ends of the link: plain data to bytes, and bytes to plain data."""
    step = update(num_deltas)
    data = written(step)
    yield "link, replica's end: us per delta", best_us(lambda: written(step)) / num_deltas
    read = lambda: read_response(engine_pb2.LinkResponse.FromString(data))  # noqa: E731
    yield "link, router's end: us per delta", best_us(read) / num_deltas


def written(step: StepUpdate) -> bytes:
    (message,) = step_messages(step)
    return message.SerializeToString()


def update(num_deltas: int) -> StepUpdate:
    load = EngineLoad(num_running=32, num_waiting=0, num_waiting_tokens=0, num_free_blocks=1000, num_total_blocks=2000)
    deltas = tuple(
        TokenDelta(attempt=AttemptKey("link-1", 1000 + index), first_token_index=100, token_ids=(token_at(index),))
        for index in range(num_deltas)
    )
    return StepUpdate(load=load, step_id=12345, deltas=deltas)


def best_us(action: Callable[[], object]) -> float:
    """Of CPU time, the fastest tenth's slowest."""
    times = []
    for _ in range(REPEATS):
        began = time.thread_time_ns()
        action()
        times.append((time.thread_time_ns() - began) / 1e3)
    return sorted(times)[REPEATS // 10]

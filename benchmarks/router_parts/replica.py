"""Replica without a model: the real link over a real socket, in front of an engine that only counts.

Each step gives every running request its next token.
"""

import argparse
import threading
import time
from collections.abc import Hashable
from typing import Any, cast

from benchmarks.router_parts.load import info, token_at
from benchmarks.router_parts.orders import run, say, until_the_end
from holdfast.cluster.serve.tracing import SCOPE, tracer_provider
from holdfast.worker.config import HealthConfig, TelemetryConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.progress import ProgressCounter
from holdfast.worker.replica.link import LinkServer
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import EngineLoad, EngineRequest, FinishReason, TokenDelta
from holdfast.worker.step_update import StepListener, StepUpdate


class PacedEngine:
    """As much of an `Engine` as a link needs: it makes deltas at a steady pace, on a thread of its own."""

    def __init__(self, steps_per_s: float) -> None:
        self.progress = ProgressCounter()
        self.has_work = False
        self.load = EngineLoad(
            num_running=0, num_waiting=0, num_waiting_tokens=0, num_free_blocks=100_000, num_total_blocks=100_000
        )
        self._gap_s = 1 / steps_per_s
        self._lock = threading.Lock()
        self._running: dict[StepListener, dict[Hashable, list[int]]] = {}
        """By attempt: tokens so far, and tokens to make."""
        self._num_steps = 0
        threading.Thread(target=self._run, daemon=True).start()

    def attach(self, listener: StepListener) -> None:
        with self._lock:
            self._running[listener] = {}

    def detach(self, listener: StepListener) -> None:
        with self._lock:
            self._running.pop(listener, None)

    def follow_cache(self, listener: StepListener) -> None:
        pass

    def submit(self, request: EngineRequest, listener: StepListener, attempt: Hashable) -> None:
        num_tokens = request.sampling_params.max_tokens
        with self._lock:
            self._running[listener][attempt] = [len(request.output_token_ids), num_tokens or 0]

    def abort(self, attempt: Hashable) -> None:
        with self._lock:
            for running in self._running.values():
                running.pop(attempt, None)

    def _run(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + self._gap_s, time.monotonic())
            time.sleep(max(0.0, due_s - time.monotonic()))
            with self._lock:
                self._step()

    def _step(self) -> None:
        self._num_steps += 1
        for listener, running in self._running.items():
            deltas = tuple([self._delta(attempt, count) for attempt, count in running.items()])
            for delta in deltas:
                if delta.finish_reason is not None:
                    del running[delta.attempt]
            if deltas:
                listener.on_update(StepUpdate(load=self.load, step_id=self._num_steps, deltas=deltas))

    def _delta(self, attempt: Hashable, count: list[int]) -> TokenDelta:
        index, end = count
        count[0] += 1
        return TokenDelta(
            attempt=attempt,
            first_token_index=index,
            token_ids=(token_at(index),),
            finish_reason=FinishReason.LENGTH if index + 1 >= end else None,
        )


class Modelless:
    """As much of a `Replica` as a link server needs."""

    def __init__(self, engine: PacedEngine) -> None:
        self.engine = cast(Engine, engine)
        self.info = info()
        self.health = HealthConfig()


async def main(steps_per_s: float, otlp_endpoint: str | None) -> None:
    replica: Any = Modelless(PacedEngine(steps_per_s))
    tracing = tracer_provider(TelemetryConfig(otlp_endpoint=otlp_endpoint), "replica", "r0")
    tracer = None if tracing is None else tracing.get_tracer(SCOPE)
    server = await LinkServer.start(cast(Replica, replica), replica_id="r0", tracer=tracer)
    say(address=server.address)
    await until_the_end()
    await server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps_per_s", type=float)
    parser.add_argument("--otlp-endpoint", help="trace what comes with a trace context, and send the spans there")
    arguments = parser.parse_args()
    run(main(arguments.steps_per_s, arguments.otlp_endpoint))

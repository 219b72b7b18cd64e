"""Replicas without a model: the real link over real sockets, in front of engines that only count.

Each step gives every running request its next token. Replicas may say that they have prefixes cached. All of them are
in this process, with a server and a port for each.
"""

import argparse
import queue
import threading
import time
from collections.abc import Hashable, Sequence
from typing import Any, Final, cast

from benchmarks.router_parts.load import PREFIX_TOKENS, info, prefixed_prompt, token_at
from benchmarks.router_parts.orders import run, say, until_the_end
from holdfast.cluster.serve.member_process import SCOPE, tracer_provider
from holdfast.router.dispatch.prefix_index import PromptPrefix
from holdfast.worker.config import HealthConfig, TelemetryConfig
from holdfast.worker.engine.engine import Engine
from holdfast.worker.progress import ProgressCounter
from holdfast.worker.replica.link_server import LinkServer
from holdfast.worker.replica.replica import Replica
from holdfast.worker.request import EngineLoad, EngineRequest, FinishReason, TokenDelta
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.step_update import CacheChanges, StepListener, StepUpdate

BLOCKS_PER_UPDATE: Final = 10_000


class Stepper:
    """The thread that makes the steps of all engines: at a steady pace, or with a pace of 0 as soon as one has work."""

    def __init__(self, steps_per_s: float) -> None:
        self.engines: list[PacedEngine] = []
        self._steps_per_s = steps_per_s
        self._at_work = queue.SimpleQueue[PacedEngine]()
        threading.Thread(target=self._run_paced if steps_per_s else self._run_at_once, daemon=True).start()

    def note_work(self, engine: "PacedEngine") -> None:
        if not self._steps_per_s:
            self._at_work.put(engine)

    def _run_paced(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + 1 / self._steps_per_s, time.monotonic())
            time.sleep(max(0.0, due_s - time.monotonic()))
            for engine in self.engines:
                engine.step()

    def _run_at_once(self) -> None:
        while True:
            engine = self._at_work.get()
            while engine.step():
                pass


class PacedEngine:
    """As much of an `Engine` as a link needs."""

    def __init__(self, stepper: Stepper, cached: Sequence[int] = ()) -> None:
        self.progress = ProgressCounter()
        self.has_work = False
        self.load = EngineLoad(
            num_running=0, num_waiting=0, num_waiting_tokens=0, num_free_blocks=100_000, num_total_blocks=100_000
        )
        self._cached = cached
        self._stepper = stepper
        self._lock = threading.Lock()
        self._running: dict[StepListener, dict[Hashable, list[int]]] = {}
        """By attempt: tokens so far, and tokens to make."""
        self._num_steps = 0
        stepper.engines.append(self)

    def attach(self, listener: StepListener) -> None:
        with self._lock:
            self._running[listener] = {}

    def detach(self, listener: StepListener) -> None:
        with self._lock:
            self._running.pop(listener, None)

    def follow_cache(self, listener: StepListener) -> None:
        for first in range(0, len(self._cached), BLOCKS_PER_UPDATE):
            stored = CacheChanges(stored=list(self._cached[first : first + BLOCKS_PER_UPDATE]))
            listener.on_update(StepUpdate(load=self.load, cache=stored))

    def submit(self, request: EngineRequest, listener: StepListener, attempt: Hashable) -> None:
        num_tokens = request.sampling_params.max_tokens
        with self._lock:
            self._running[listener][attempt] = [len(request.output_token_ids), num_tokens or 0]
        self._stepper.note_work(self)

    def abort(self, attempt: Hashable) -> None:
        with self._lock:
            for running in self._running.values():
                running.pop(attempt, None)

    def step(self) -> bool:
        """Whether anything is left to do."""
        with self._lock:
            self._num_steps += 1
            for listener, running in self._running.items():
                deltas = tuple([self._delta(attempt, count) for attempt, count in running.items()])
                for delta in deltas:
                    if delta.finish_reason is not None:
                        del running[delta.attempt]
                if deltas:
                    listener.on_update(StepUpdate(load=self.load, step_id=self._num_steps, deltas=deltas))
            return any(self._running.values())

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
        self.movers = None


def cached_blocks(number: int, num_replicas: int, num_prefixes: int) -> list[int]:
    """What one replica has of so many prefixes, each of which one replica has."""
    found = []
    for name in range(number, num_prefixes, num_replicas):
        request = EngineRequest(
            request_id="", prompt_token_ids=prefixed_prompt(name, 0), sampling_params=SamplingParams(seed=1)
        )
        found += list(PromptPrefix(request).blocks(info().block_size))[: PREFIX_TOKENS // info().block_size]
    return found


async def main(steps_per_s: float, num_replicas: int, num_prefixes: int, otlp_endpoint: str | None) -> None:
    stepper, servers = Stepper(steps_per_s), []
    tracing = tracer_provider(TelemetryConfig(otlp_endpoint=otlp_endpoint), "replica", "r0")
    tracer = None if tracing is None else tracing.get_tracer(SCOPE)
    for number in range(num_replicas):
        engine = PacedEngine(stepper, cached_blocks(number, num_replicas, num_prefixes))
        replica: Any = Modelless(engine)
        servers.append(await LinkServer.start(cast(Replica, replica), replica_id=f"r{number}", tracer=tracer))
    say(address=",".join(server.address for server in servers))
    await until_the_end()
    for server in servers:
        await server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps_per_s", type=float, help="0: as fast as there is work")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--prefixes", type=int, default=0, help="that they have cached, all together")
    parser.add_argument("--otlp-endpoint", help="trace what comes with a trace context, and send the spans there")
    arguments = parser.parse_args()
    run(main(arguments.steps_per_s, arguments.replicas, arguments.prefixes, arguments.otlp_endpoint))

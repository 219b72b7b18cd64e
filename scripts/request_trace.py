"""Trace of one warm request of 8 tokens through the real code: the functions, files and rooms that it runs.

By `sys.setprofile`, on three hosts: offline (`LLM`), and a router and a replica in one process, asked over gRPC and
over HTTP. The clients are not ours (a bare gRPC channel, urllib), so that what is counted is what serves. All threads
are traced but those that look at something at regular times (`WATCHING`): they run without a request, too.
"""

import asyncio
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path, PurePath
from types import FrameType
from typing import Any

import grpc

from benchmarks.static_directory import StaticDirectory
from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.cluster.offline.llm import LLM
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.links.replica_directory import ReplicaEndpoint
from holdfast.router.server.router import Router
from holdfast.v1 import inference_pb2, inference_pb2_grpc
from holdfast.worker.config import CacheConfig, ModelConfig, WorkerConfig
from holdfast.worker.replica.link_server import LinkServer
from holdfast.worker.replica.replica import Replica
from holdfast.worker.sampling_params import SamplingParams

ROOT = Path(__file__).parents[1]
PACKAGES = ("worker", "router", "cluster")
PROMPT = "The capital of France is"
NUM_TOKENS = 8
TIMEOUT_S = 60
WATCHING = ("watchdog", "known_answer_check")


@dataclass
class Trace:
    """Calls of our functions, in order: (thread, file, function)."""

    calls: list[tuple[str, str, str]] = field(default_factory=list)
    is_on: bool = False

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call" and (name := _ours(frame.f_code.co_filename)):
            thread = threading.current_thread().name
            if thread not in WATCHING:
                self.calls.append((thread, name, frame.f_code.co_qualname))

    @property
    def functions(self) -> set[tuple[str, str]]:
        return {(name, function) for _, name, function in self.calls}

    @property
    def files(self) -> set[str]:
        return {name for name, _ in self.functions}

    @property
    def rooms(self) -> Counter[str]:
        """Functions by the room that they are in."""
        return Counter(str(PurePath(name).parent) for name, _ in self.functions)

    def returns(self) -> int:
        """How often a thread came back to a room that it had left, on the way from the first call to the first step.
        The roots of the packages, plain data, are no rooms here.
        """
        way = [(thread, str(PurePath(name).parent)) for thread, name, _ in self._way_down()]
        way = [(thread, room) for thread, room in way if room not in PACKAGES]
        num_returns = 0
        for thread in dict.fromkeys(thread for thread, _ in way):
            stays = [room for room, _ in groupby(room for other, room in way if other == thread)]
            num_returns += len(stays) - len(set(stays))
        return num_returns

    def _way_down(self) -> Iterator[tuple[str, str, str]]:
        for call in self.calls:
            if call[2] == "Scheduler.plan":
                return
            yield call


def _ours(filename: str) -> str | None:
    """The file below the root, of code of Holdfast's."""
    name = filename.removeprefix(f"{ROOT}/").removeprefix("holdfast/")
    return name if name.startswith(tuple(f"{package}/" for package in PACKAGES)) else None


@contextmanager
def tracing() -> Iterator[Trace]:
    """From here on, threads that start are traced; what they do is noted while `is_on`."""
    trace = Trace()
    threading.setprofile(trace.note)
    sys.setprofile(trace.note)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def offline(config: WorkerConfig) -> Trace:
    """`LLM.generate`, the second time."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    with tracing() as trace, LLM("demo", num_gpu_blocks_override=config.cache.num_blocks) as llm:
        _warm_and_traced(trace, lambda: llm.generate([PROMPT], params, use_tqdm=False))
    return trace


def served(config: WorkerConfig) -> dict[str, Trace]:
    """A router and a replica with a real link between them: a stream over gRPC, and one over HTTP."""
    found = {}
    for api, ask in {"gRPC": ask_grpc, "HTTP": ask_http}.items():
        with tracing() as trace, _router(config) as router:
            _warm_and_traced(trace, lambda ask=ask, router=router: ask(router))  # type: ignore[misc]
        found[api] = trace
    return found


def _warm_and_traced(trace: Trace, ask: Callable[[], object]) -> None:
    for trace.is_on in (False, False, True):
        ask()
    trace.is_on = False


@contextmanager
def _router(config: WorkerConfig) -> Iterator[Router]:
    ready, over = threading.Event(), threading.Event()
    started: list[Router] = []

    async def run() -> None:
        replica = await asyncio.to_thread(Replica.start, config)
        link = await LinkServer.start(replica, replica_id="traced")
        endpoint = ReplicaEndpoint(
            replica_id="traced", address=link.address, model=replica.info.model, model_path=replica.info.path
        )
        router = await Router.start(RouterConfig(), LimitsConfig(), StaticDirectory([endpoint]), http_port=0)
        started.append(router)
        ready.set()
        await asyncio.to_thread(over.wait)
        await router.stop()
        await link.stop()
        await asyncio.to_thread(replica.stop)

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="loop")
    thread.start()
    ready.wait(TIMEOUT_S)
    try:
        _wait_for_a_replica(started[0])
        yield started[0]
    finally:
        over.set()
        thread.join()


def _wait_for_a_replica(router: Router) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until_s:
        with suppress(urllib.error.HTTPError), urllib.request.urlopen(f"http://{router.http_address}/health"):
            return
        time.sleep(0.01)
    raise TimeoutError("the router has no replica")


def ask_grpc(router: Router) -> None:
    params = inference_pb2.SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    with grpc.insecure_channel(router.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        request = inference_pb2.GenerateRequest(text=PROMPT, sampling_params=params)
        assert list(stub.GenerateStream(request, timeout=TIMEOUT_S))


def ask_http(router: Router) -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"http://{router.http_address}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        assert b"[DONE]" in answer.read()


def traces() -> dict[str, Trace]:
    config = located(WorkerConfig(model=ModelConfig(), cache=CacheConfig(num_blocks=200)))
    return {"offline": offline(config), **served(config)}

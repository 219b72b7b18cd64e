"""A whole day of a cluster in one run: it grows and shrinks, its model is replaced, a canary is taken back, a node is
lost, and Ray's GCS; and streams run all the while.

    python -m tests.chaos.whole_day FILE     # writes one JSON object: for each event its seconds and its streams

A program of its own, because a process has one connection to Ray. As many streams are kept open as 70 % of what the
replicas can run at a time.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from tests.chaos.head_loss import RECONNECT_S, redis

NAME: Final = "day"
MOST: Final = 4
MAX_NUM_SEQS: Final = 4
USE: Final = 0.7
GCS_AWAY_S: Final = 15.0
LIMIT_S: Final = 150.0
POLL_S: Final = 0.1
PLACE: Final = "holdfast_rank"
HEAD: Final = {"num_cpus": 4, "resources": {"front_door": 2}, "include_dashboard": False}
NODE: Final = {"num_cpus": 2, "resources": {PLACE: 4}}
STORE: Final = 80 * 2**20


@dataclass
class Stream:
    """One answer, as it came."""

    number: int
    token_ids: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    is_guaranteed: bool = True
    error: str = ""
    begun_s: float = 0.0
    ended_s: float | None = None
    longest_pause_s: float = 0.0
    """Between two tokens."""


@dataclass
class Event:
    """What happened to the cluster, and the streams that were open meanwhile."""

    name: str
    seconds: float
    streams: list[Stream]


class Traffic:
    """Clients on an event loop of their own, which ask again and again: as many as are wanted."""

    def __init__(self, routers: Sequence[str]) -> None:
        self._routers = list(routers)
        self.num_wanted = 0
        self.streams: list[Stream] = []

    async def run(self) -> None:
        most = int(USE * MOST * MAX_NUM_SEQS)
        async with asyncio.TaskGroup() as tasks:
            for number in range(most):
                tasks.create_task(self._client(number, most))

    async def _client(self, number: int, stride: int) -> None:
        from holdfast.cluster.client.async_client import AsyncClient

        wish = number
        async with AsyncClient(self._routers, draw=lambda: (number % 2) / 2) as client:
            while True:
                while number >= self.num_wanted:
                    await asyncio.sleep(POLL_S)
                await self._ask(client, wish)
                wish += stride

    async def _ask(self, client: Any, number: int) -> None:
        from holdfast.worker.errors import HoldfastError
        from holdfast.worker.model_info import version_of
        from tests.integration.updates_at_run_time import wish

        asked, stream = wish(number), Stream(number, begun_s=time.monotonic())
        self.streams.append(stream)
        last_s = None
        try:
            async for chunk in client.stream(asked.prompt, asked.params, model=NAME):
                now_s = time.monotonic()
                stream.longest_pause_s = max(stream.longest_pause_s, now_s - (last_s or now_s))
                last_s = now_s
                stream.token_ids += chunk.token_ids
                stream.is_guaranteed &= not chunk.replayed_without_guarantee
                if (version := version_of(chunk.system_fingerprint)) not in stream.versions:
                    stream.versions.append(version)
        except HoldfastError as error:
            stream.error = f"{type(error).__name__}: {error}"
        stream.ended_s = time.monotonic()


class Day:
    """The events, one after the other."""

    def __init__(self, nodes: Any, workers: list[Any], config: Any, traffic: Traffic, report: Any) -> None:
        self._nodes, self._workers, self._config = nodes, workers, config
        self._traffic, self._report = traffic, report

    def events(self) -> Iterator[Event]:
        yield self._during("1 to 4 replicas", lambda: self._ask_for(MOST))
        yield self._during("4 to 1", lambda: self._ask_for(1))
        yield self._during("a rolling update of the weights", lambda: self._update("draft"))
        yield self._during("a canary with wrong answers, taken back", self._canary)
        yield self._during("1 to 2, so that each node may have one", lambda: self._ask_for(2))
        yield self._during("loss of a node", self._lose_a_node)
        yield self._during("loss of Ray's GCS", self._lose_the_gcs)

    def _during(self, name: str, happen: Callable[[], object]) -> Event:
        began_s = time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
        happen()
        seconds = time.monotonic() - began_s
        met = [one for one in list(self._traffic.streams) if one.ended_s is None or one.ended_s >= began_s]
        self._until(lambda: all(one.ended_s is not None for one in met))
        return Event(name, seconds, met)

    def _ask_for(self, num_replicas: int) -> None:
        """As much traffic as wants that many replicas, until they serve."""
        self._traffic.num_wanted = int(USE * num_replicas * MAX_NUM_SEQS)
        self._until(lambda: self._num_serving() == num_replicas)

    def _num_serving(self) -> int:
        from holdfast.cluster.serve import models

        found = models.list_models(self._config.cluster.namespace)
        return next((one.num_replicas for one in found if one.name == NAME), 0)

    def _update(self, folder: str) -> None:
        from holdfast.cluster.serve.serving import update_model
        from holdfast.cluster.serve.updates import UpdatePlan

        update_model(with_model(self._config, folder), UpdatePlan(model=NAME), self._report)

    def _canary(self) -> None:
        from holdfast.cluster.serve.canary import KnownAnswer
        from holdfast.cluster.serve.serving import update_model
        from holdfast.cluster.serve.updates import UpdatePlan
        from holdfast.worker.errors import UpdateRolledBackError

        wrong = KnownAnswer(prompt="The capital of France is", starts_with="no such answer")
        plan = UpdatePlan(model=NAME, share=0.5)
        try:
            update_model(with_model(self._config, "model"), plan, self._report, [wrong])
        except UpdateRolledBackError:
            return
        raise AssertionError("the canary was not taken back")

    def _lose_a_node(self) -> None:
        """SIGKILL to the raylet of a node with a replica of the model; another node comes."""
        node = next(one for one in self._workers if replicas_of(one))
        lost = replicas_of(node)
        self._nodes.remove_node(node, allow_graceful=False)
        assert psutil.wait_procs(lost, 15)[1] == [], "they live on where their node does not"
        self._workers.append(self._nodes.add_node(**NODE, object_store_memory=STORE))
        self._until(lambda: self._num_serving() == 2)

    def _lose_the_gcs(self) -> None:
        head, struck_s = self._nodes.head_node, time.monotonic()
        head.kill_gcs_server()
        num_before = len(self._traffic.streams)
        self._until(lambda: time.monotonic() > struck_s + GCS_AWAY_S)
        self._until(lambda: len(self._traffic.streams) > num_before)  # new ones are served while it is away
        head.start_gcs_server()
        self._until(lambda: self._num_serving() == 2)

    @staticmethod
    def _until(condition: Callable[[], bool]) -> None:
        limit_s = time.monotonic() + LIMIT_S
        while not _holds(condition):
            if time.monotonic() > limit_s:
                raise TimeoutError
            time.sleep(POLL_S)


def _holds(condition: Callable[[], bool]) -> bool:
    """False where Ray does not answer, as while its GCS is away."""
    try:
        return condition()
    except Exception as error:  # Ray raises many kinds
        print(f"asked again: {type(error).__name__}", file=sys.stderr)
        return False


def replicas_of(node: Any) -> list[psutil.Process]:
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [one for one in raylet.children(recursive=True) if ":Replica" in " ".join(one.cmdline())]


def folder_of(name: str) -> str:
    from holdfast.cluster.bundled_model import bundled_model

    return str(Path(bundled_model.__file__).parent / name)


def with_model(config: Any, name: str) -> Any:
    model = config.model.model_copy(update={"model": folder_of(name)})
    return config.model_copy(update={"model": model})


@contextmanager
def traffic_to(routers: Sequence[str]) -> Iterator[Traffic]:
    from tests.chaos.ray_nodes import other_thread

    traffic = Traffic(routers)
    with other_thread() as do:

        async def begin() -> "asyncio.Task[None]":
            return asyncio.create_task(traffic.run())

        async def end(running: "asyncio.Task[None]") -> None:
            running.cancel()
            await asyncio.wait([running])

        running = do(begin())
        try:
            yield traffic
        finally:
            do(end(running))


def right_answers(streams: Sequence[Stream], folders: dict[str, str]) -> dict[tuple[str, int], list[int]]:
    """What one process gives for each stream's request, by version and number; there are a few different ones."""
    from holdfast.cluster.offline.llm import LLM
    from tests.integration.updates_at_run_time import wish

    found = {}
    for version, folder in folders.items():
        numbers = [one.number for one in streams if one.versions == [version]]
        wishes = {(wish(number).prompt, wish(number).params): number for number in numbers}
        with LLM(folder, num_threads=2) as llm:
            outputs = llm.generate([prompt for prompt, _ in wishes], [params for _, params in wishes], use_tqdm=False)
        tokens = {key: list(output.outputs[0].token_ids) for key, output in zip(wishes, outputs, strict=True)}
        found |= {(version, number): tokens[wish(number).prompt, wish(number).params] for number in numbers}
    return found


def judged(events: Sequence[Event]) -> dict[str, Any]:
    """Of each event: streams, those that failed, and those with other tokens than one process alone gives."""
    streams = [stream for event in events for stream in event.streams]
    versions = list(dict.fromkeys(version for stream in streams for version in stream.versions))
    old, new = versions[0], versions[1]
    right = right_answers(streams, {old: folder_of("model"), new: folder_of("draft")})
    return {
        event.name: {
            "seconds": event.seconds,
            "streams": len(event.streams),
            "failed": [stream.error for stream in event.streams if stream.error],
            "changed": [
                asdict(stream)
                for stream in event.streams
                if not stream.error
                and (
                    len(stream.versions) != 1
                    or not stream.is_guaranteed
                    or stream.token_ids != right.get((stream.versions[0], stream.number))
                )
            ],
            "longest_pause_s": max((stream.longest_pause_s for stream in event.streams), default=0.0),
        }
        for event in events
    }


def run_the_day() -> list[Event]:
    from ray.cluster_utils import Cluster

    from holdfast.cluster.config.config import ClusterConfig, HoldfastConfig
    from holdfast.cluster.progress_bars import progress
    from holdfast.cluster.scaling.demand_book import ScalingConfig
    from holdfast.cluster.serve.serving import add_model, serving
    from holdfast.worker.config import ModelConfig, ParallelConfig, SchedulerConfig

    nodes = Cluster(initialize_head=True, head_node_args={**HEAD, "object_store_memory": STORE})
    workers = [nodes.add_node(**NODE, object_store_memory=STORE) for _ in range(2)]
    cluster = ClusterConfig(
        address=nodes.address,
        host="127.0.0.1",
        port=0,
        replicas=1,
        cpus_per_rank=0.1,
        rank_resources={PLACE: 1.0},
        router_resources={"front_door": 1.0},
        drain_timeout_s=60.0,
    )
    one_thread = ParallelConfig(num_threads=1)
    config = HoldfastConfig(
        model=ModelConfig(model=folder_of("model"), served_model_name=NAME),
        parallel=one_thread,
        scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS),
        cluster=cluster,
        scaling=ScalingConfig(max_replicas=MOST, min_replicas=1, target_ttft_s=5.0, downscale_after_s=10.0),
    )
    with (
        progress(sys.stderr) as report,
        serving(HoldfastConfig(cluster=cluster, parallel=one_thread), report) as running,
        traffic_to(running.routers) as traffic,
    ):
        add_model(config, report)
        events = list(Day(nodes, workers, config, traffic, report).events())
    started = psutil.Process().children(recursive=True)
    nodes.shutdown()
    for process in psutil.wait_procs(started, 15)[1]:
        process.kill()
    return events


def main(results: Path) -> None:
    with redis() as address:
        os.environ["RAY_REDIS_ADDRESS"] = address
        # Ray runs Python between fork and exec when it starts a GCS, while the load's threads are inside of gRPC.
        os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
        os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(RECONNECT_S)  # noqa: SIM112  # as Ray spells it
        events = run_the_day()
    results.write_text(json.dumps(judged(events)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

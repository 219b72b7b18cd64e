"""A cluster of real processes that come up in milliseconds: two routers and some replicas, forked by the fork server.

All clusters of a test process have fork servers of one parent, which loads the libraries and the model once.
"""

import asyncio
import atexit
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import psutil

from holdfast.cluster.client.async_client import AsyncClient
from holdfast.router.links.replica_directory import ReplicaEndpoint
from holdfast.v1 import inference_pb2
from holdfast.worker.config import CacheConfig, KVCacheDtype
from holdfast.worker.errors import ReplicaError
from tests.fakes import Wire

POLL_S = 0.003
UP_S = 15.0
START_S = 60.0
STEP_S = 0.006
"""Seconds, at least, of a step of a replica."""


@dataclass(frozen=True)
class Forked:
    """A process that is up."""

    id: str
    address: str
    pid: int
    rank_pid: int = 0
    """Of a replica's second rank, if it has one."""
    http_address: str = ""
    """Of a router."""

    @property
    def second_rank(self) -> "Forked":
        return replace(self, pid=self.rank_pid)

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


@dataclass(frozen=True)
class ForkServer:
    """One that is up."""

    pid: int
    orders: int
    """Where they are written to. It ends when this is closed."""
    news: int


class ForkServers:
    """The process that has loaded everything, and forks them. It ends with this process."""

    def __init__(self) -> None:
        self._begin()
        atexit.register(self.close)

    def _begin(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def fork(self, settings: Mapping[str, Any], stderr: IO[str] | None) -> ForkServer:
        if (status := self._process.poll()) is not None:  # no test is about this process: the next one needs it
            warnings.warn(f"fork servers' parent ended with status {status}: another begins", stacklevel=2)
            self._socket.close()
            self._begin()
        (stdin, orders), (news, stdout) = os.pipe(), os.pipe()
        streams = [stdin, stdout, 2 if stderr is None else stderr.fileno()]
        socket.send_fds(self._socket, [json.dumps(settings).encode()], streams)
        os.close(stdin)
        os.close(stdout)
        return ForkServer(int(self._socket.recv(16)), orders, news)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@cache
def fork_servers() -> ForkServers:
    """Begun once: loading takes longer than most of the tests."""
    return ForkServers()


class ForkedCluster:
    """Made by `forked_cluster`. A process that it is told to kill is replaced when asked for."""

    def __init__(
        self,
        fork_server: ForkServer,
        directory: Path,
        step_s: float,
        num_ranks: int,
        wired: bool,
        self_check_every_s: float,
        poison: str = "",
    ) -> None:
        self._fork_server = fork_server
        self._poison = poison
        self._self_check_every_s = self_check_every_s
        self._directory = directory
        self._step_s = step_s
        self._num_ranks = num_ranks
        self._wired = wired
        self._speculative = itertools.cycle(("none", "ngram", "suffix"))
        self._numbers = itertools.count()
        self._expected: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())
        self._endpoints: dict[str, ReplicaEndpoint] = {}
        self.replicas: dict[str, Forked] = {}
        self.wires: dict[str, Wire] = {}
        """Between the routers and each replica, in a cluster that has them."""
        self.routers: list[Forked] = []
        self.watchers: list[AsyncClient] = []
        """A client for each router, to look at it alone."""

    @property
    def addresses(self) -> list[str]:
        return [router.address for router in self.routers]

    async def come_up(self) -> None:
        self._publish()
        await self._news_of("fork_server")
        self.routers = [await self.add_router() for _ in range(2)]
        self.watchers = [AsyncClient(address) for address in self.addresses]
        for _ in range(3):
            await self.add_replica()
        await self.until_up()

    async def add_replica(self, rots_at_step: int | None = None) -> Forked:
        """Each with another way to guess tokens than the one before: what one began goes on at the other.

        One of its weights may change in its memory, later.
        """
        name = f"replica-{next(self._numbers)}"
        news = await self._order(
            name,
            step_s=self._step_s,
            speculative=next(self._speculative),
            num_ranks=self._num_ranks,
            self_check_every_s=self._self_check_every_s,
            rots_at_step=rots_at_step,
        )
        replica = self.replicas[name] = Forked(name, news["address"], news["pid"], news["rank_pid"])
        address = replica.address
        if self._wired:
            wire = self.wires[name] = await Wire.start(int(address.rpartition(":")[2]))
            address = f"127.0.0.1:{wire.port}"
        self._endpoints[name] = ReplicaEndpoint(
            replica_id=name, address=address, model=news["model"], model_path=news["model_path"]
        )
        self._publish()
        return replica

    async def add_router(self, port: int = 0, http_port: int = 0) -> Forked:
        name = f"router-{next(self._numbers)}"
        directory = str(self._directory)
        news = await self._order(name, directory=directory, port=port, http_port=http_port, poison=self._poison)
        return Forked(name, news["address"], news["pid"], http_address=news["http_address"])

    async def replace_router(self, lost: Forked) -> Forked:
        """Another one, on the same ports."""
        await gone(lost)
        router = await self.add_router(_port_of(lost.address), _port_of(lost.http_address))
        self.routers[self.routers.index(lost)] = router
        return router

    def forget(self, replica: Forked) -> None:
        """Tells the routers that it is no more."""
        del self.replicas[replica.id], self._endpoints[replica.id]
        self._publish()

    async def until_up(self) -> None:
        """Every router is linked to the replicas that there are, and to no others."""
        deadline_s = time.monotonic() + UP_S
        for router, watcher in zip(self.routers, self.watchers, strict=True):
            while (linked := {load.replica_id for load in await loads(watcher)}) != self.replicas.keys():
                assert time.monotonic() < deadline_s, f"{router} has {linked}, not {list(self.replicas.values())}"
                await asyncio.sleep(POLL_S)

    async def serving_replica(self, is_over: Callable[[], bool]) -> Forked | None:
        """The one that runs something now; None once it is over."""
        while not is_over():
            for watcher in self.watchers:
                for load in await loads(watcher):
                    if load.num_running and load.replica_id in self.replicas:
                        return self.replicas[load.replica_id]
            await asyncio.sleep(POLL_S)
        return None

    async def num_computed(self) -> dict[str, int]:
        """How many tokens each replica has computed. Returns when nothing runs."""
        deadline_s = time.monotonic() + UP_S
        while True:
            heard = [load for watcher in self.watchers for load in await loads(watcher)]
            if heard and not any(load.num_running or load.num_waiting for load in heard):
                return {load.replica_id: load.stats.num_tokens_computed for load in heard}
            assert time.monotonic() < deadline_s, f"something runs on for ever: {heard}"
            await asyncio.sleep(POLL_S)

    async def serving_router(self, is_over: Callable[[], bool]) -> Forked | None:
        """The one that has a request open; None once it is over."""
        while not is_over():
            for router, watcher in zip(self.routers, self.watchers, strict=True):
                if (await watcher.get_load()).num_open:
                    return router
            await asyncio.sleep(POLL_S)
        return None

    async def close(self) -> None:
        for watcher in self.watchers:
            await watcher.close()
        for wire in self.wires.values():
            await wire.stop()
        children = psutil.Process(self._fork_server.pid).children(recursive=True)
        for child in children:
            child.send_signal(signal.SIGCONT)
        os.close(self._fork_server.orders)
        await self._reading
        assert psutil.wait_procs(children, timeout=5)[1] == []

    # --- inside ---

    async def _order(self, name: str, **order: Any) -> dict[str, Any]:
        os.write(self._fork_server.orders, (json.dumps({"id": name, **order}) + "\n").encode())
        return await self._news_of(name)

    async def _news_of(self, name: str) -> dict[str, Any]:
        self._expected[name] = asyncio.get_running_loop().create_future()
        return await asyncio.wait_for(self._expected[name], START_S)

    async def _read(self) -> None:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(self._fork_server.news, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        async for line in reader:
            news = json.loads(line)
            expected = self._expected.pop(news["id"])
            if not expected.done():  # whoever asked for it may have been cancelled
                expected.set_result(news)
        transport.close()

    def _publish(self) -> None:
        new = self._directory.with_suffix(".new")
        new.write_text(json.dumps([asdict(endpoint) for endpoint in self._endpoints.values()]))
        new.replace(self._directory)


async def loads(watcher: AsyncClient) -> list[inference_pb2.ReplicaLoad]:
    """What a router says of its replicas; nothing where there is no router."""
    try:
        return list((await watcher.get_load()).replicas)
    except ReplicaError:
        return []


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def gone(process: Forked) -> None:
    """Returns once a process that was killed is."""
    while psutil.pid_exists(process.pid):
        await asyncio.sleep(POLL_S)


@asynccontextmanager
async def forked_cluster(
    folder: Path,
    *,
    step_s: float = STEP_S,
    num_blocks: int = 200,
    kv_cache_dtype: KVCacheDtype = "auto",
    num_ranks: int = 1,
    wired: bool = False,
    self_check_every_s: float = 0.0,
    stderr: IO[str] | None = None,
    poison: str = "",
    model: Mapping[str, Any] = MappingProxyType({}),
    planted: str = "",
) -> AsyncIterator[ForkedCluster]:
    """Two routers and three replicas, of one rank or two, whose steps take at least `step_s`. Prompts that begin with
    `poison` end the router that reads them. `model` are its settings besides the bundled model; `planted` names a
    mistake (`tests/chaos/planted/adapters.py`).

    Without self-checks unless asked for: with them, what replicas compute is not for clients alone.
    """
    cache = CacheConfig(num_blocks=num_blocks, kv_cache_dtype=kv_cache_dtype)
    settings = {"cache": cache.model_dump(mode="json"), "model": dict(model), "planted": planted}
    fork_server = await asyncio.to_thread(lambda: fork_servers().fork(settings, stderr))
    directory = folder / "replicas.json"
    cluster = ForkedCluster(fork_server, directory, step_s, num_ranks, wired, self_check_every_s, poison)
    try:
        await cluster.come_up()
        yield cluster
    finally:
        await cluster.close()

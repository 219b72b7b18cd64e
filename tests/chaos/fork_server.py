"""A process that loads the libraries and the bundled model once, and forks fork servers: one for each cluster.

    python -m tests.chaos.fork_server 5    # the number of its socket, over which it is told the settings of a
    cluster's caches, and given the standard streams of its fork server

A fork server forks replicas and routers that are up at once. It reads orders, one JSON object a line, and answers each
with a line when it is up. What it forks is what serves anywhere: an engine behind its link, a router behind its port.
Ray alone is missing. They end with the fork server, and it with its stdin.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from ctypes import c_uint32
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.cluster.serve.crash_journal import CrashJournals
from holdfast.cluster.serve.member_process import ProcessEnd, end_when_out_of_memory
from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.router.links.replica_directory import DirectoryView, ReplicaEndpoint
from holdfast.router.requests.reading_journal import HUNG_S, TURN_S
from holdfast.router.server.router import Router
from holdfast.router.text.tokenizer_registry import TokenizerRegistry
from holdfast.worker.config import (
    CacheConfig,
    HealthConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
    WorkerConfig,
)
from holdfast.worker.engine.model_runner import ModelRunner
from holdfast.worker.executors.tensor_parallel import SingleRank
from holdfast.worker.replica.link_server import LinkServer
from holdfast.worker.replica.rank import prepare_process
from holdfast.worker.replica.replica import Replica
from tests import loops
from tests.chaos.paced import PacedRunner, two_ranks
from tests.chaos.planted.adapters import PLANTED

LOOK_S = 0.01
FLIPPED_BIT = 9
"""Of a bfloat16: its exponent's third."""
FLUSH_S = 0.5
_MAX_BYTES = 2**16
"""Of the settings of a cluster."""


class Rot:
    """Flips one bit of a weight of its own process just before step number `step`."""

    def __init__(self, runner: ModelRunner, step: int) -> None:
        self._runner = runner
        self._left = step

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            norm = self._runner.backend.executor.packed.model.norm
            (c_uint32 * 1).from_address(norm.weight)[0] ^= 1 << (16 + FLIPPED_BIT)  # the upper half is the bfloat16


class FileDirectory:
    """A `ReplicaDirectory` in a file: a JSON list of endpoints, replaced as a whole."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    async def watch(self) -> AsyncIterator[DirectoryView]:
        seen = None
        while True:
            text = self._path.read_text()
            if text != seen:
                seen = text
                endpoints = frozenset(ReplicaEndpoint(**fields) for fields in json.loads(text))
                yield DirectoryView(endpoints=endpoints)
            await asyncio.sleep(LOOK_S)


class ForkServer:
    """The process that forks."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._planted: str = settings["planted"]
        self._config = located(
            WorkerConfig(
                model=ModelConfig(**settings["model"]),
                parallel=ParallelConfig(num_threads=1),
                cache=CacheConfig(**settings["cache"]),
                scheduler=SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=32),
            )
        )
        device = torch.device("cpu")
        prepare_process(self._config, device)
        self._runner = PacedRunner.load(self._config, SingleRank(), device=device)

    def run(self) -> None:
        """Forks on every order, until there are no more."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
        if self._planted:
            PLANTED[self._planted]()
        self._heartbeat_pipe, self._held = os.pipe()
        say(id="fork_server", address="", pid=os.getpid())
        for line in sys.stdin:
            if os.fork() == 0:
                os._exit(self._live(json.loads(line)))

    def _live(self, order: dict[str, Any]) -> int:
        """A child's whole life."""
        os.close(self._held)
        os.close(sys.stdin.fileno())
        self._begin()
        loops.run(self._router(**order) if "directory" in order else self._replica(**order), timeout_s=None)
        return 1

    def _begin(self) -> None:
        """In every process of a cluster."""
        threading.Thread(target=self._end_with_the_fork_server, daemon=True).start()
        end_when_out_of_memory()

    def _end_with_the_fork_server(self) -> None:
        os.read(self._heartbeat_pipe, 1)
        os._exit(0)

    async def _replica(
        self,
        id: str,
        step_s: float,
        speculative: str,
        num_ranks: int,
        self_check_every_s: float,
        rots_at_step: int | None,
    ) -> None:
        config = self._config.model_copy(
            update={
                "speculation": SpeculationConfig(speculative=speculative),
                "health": HealthConfig(self_check_every_s=self_check_every_s),
                "parallel": ParallelConfig(num_threads=1, tensor_parallel_size=num_ranks),
            }
        )
        runner, group, rank = (self._runner, SingleRank(), None) if num_ranks == 1 else two_ranks(config, self._begin)
        runner.step_s = step_s
        if rots_at_step is not None:
            runner.before_step = Rot(runner, rots_at_step)
        replica, rank_pid = Replica.around(config, runner, group, rank), 0 if rank is None else rank.pid
        server = await LinkServer.start(replica, replica_id=id)
        loop = asyncio.get_running_loop()
        end = ProcessEnd(lambda: asyncio.run_coroutine_threadsafe(server.stop(), loop).result(FLUSH_S))
        replica.on_failure(end.because)
        info = replica.info
        endpoint = ReplicaEndpoint(replica_id=id, address=server.address, model=info.model, model_path=info.path)
        await _for_ever(id=id, pid=os.getpid(), rank_pid=rank_pid, **asdict(endpoint))

    async def _router(self, id: str, directory: str, port: int, http_port: int, poison: str) -> None:
        router = await Router.start(
            RouterConfig(), LimitsConfig(), FileDirectory(directory), port=port, http_port=http_port
        )
        journals = CrashJournals(Path(directory).parent / "journals", router.poison_watch)
        following = asyncio.create_task(journals.follow())
        if poison:
            plant(poison)
        await _for_ever(id=id, pid=os.getpid(), address=router.address, http_address=router.http_address)
        following.cancel()


def plant(poison: str) -> None:
    """From here on a prompt that begins with this ends the process when it is tokenized: at once, or, if it says
    "hangs", once the event loop has stood still for as long as proves it.
    """
    encode = TokenizerRegistry.encode

    async def poisoned(registry: TokenizerRegistry, model: str, text: str, *arguments: Any, **options: Any) -> Any:
        if text.startswith(poison):
            if "hangs" in text:
                time.sleep(HUNG_S + 2 * TURN_S)
            os.kill(os.getpid(), signal.SIGKILL)
        return await encode(registry, model, text, *arguments, **options)

    TokenizerRegistry.encode = poisoned  # type: ignore[method-assign]


async def _for_ever(**news: Any) -> None:
    say(**news)
    await asyncio.Event().wait()


def say(**news: Any) -> None:
    """One line in one piece: children write to the same pipe."""
    os.write(sys.stdout.fileno(), (json.dumps(news) + "\n").encode())


def serve(requests: socket.socket) -> None:
    """Forks a fork server on every request, until the other side has gone. Says what its number is."""
    loaded: dict[bytes, ForkServer] = {}
    while True:
        message, streams, *_ = socket.recv_fds(requests, _MAX_BYTES, 3)
        if not message:
            return
        if message not in loaded:
            loaded[message] = ForkServer(json.loads(message))
        if (pid := os.fork()) == 0:
            requests.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            loaded[message].run()
            os._exit(0)
        for stream in streams:
            os.close(stream)
        requests.send(str(pid).encode())
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)  # one that has ended


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))

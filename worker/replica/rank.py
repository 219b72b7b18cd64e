"""Rank of a tensor-parallel group: the life of a rank that is not the leader, and the launchers of such ranks.

The leader (rank 0) lives in the process that serves the link. The others are started by a launcher: as child processes
here, as Ray actors in `cluster/serve/placement_groups.py`. They get only the settings, their number and the rendezvous
with its secret.
"""

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal, Protocol

from holdfast.worker.config import WorkerConfig
from holdfast.worker.errors import HoldfastError
from holdfast.worker.executors.rendezvous import RankListener, Rendezvous
from holdfast.worker.process_memory import loading, oom_kills, set_aside
from holdfast.worker.replica.processes import ProcessId
from holdfast.worker.wire.loopback import LOOPBACK

if TYPE_CHECKING:
    import torch

    from holdfast.worker.executors.tensor_parallel import DistributedGroup

logger = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
"""Seconds after the order to stop from which a rank that still runs is killed."""


class Ranks(Protocol):
    """The running ranks of a group, but for the leader."""

    def wait(self) -> str:
        """Blocks until a rank has ended. Returns its number and the reason."""

    def stop(self) -> None:
        """Ends the ranks that are left after the order to stop."""

    def kill(self) -> None:
        """Ends them at once. `wait` returns."""

    def processes_here(self) -> list[ProcessId]:
        """Processes on this machine; all of them are known once the group has met."""


class RankLauncher(Protocol):
    """Starts ranks 1 to n-1 of a group somewhere."""

    @property
    def meeting_host(self) -> str:
        """The address of the leader's machine for the ranks: loopback where all of them run on this machine."""

    def launch(self, config: WorkerConfig, rendezvous: Rendezvous) -> Ranks:
        """Starts them; they join the group at `rendezvous`. Its secret reaches them by a way that others cannot read.
        Returns at once.
        """


def run_rank(config: WorkerConfig, rank: int, rendezvous: Rendezvous, device: "torch.device | None" = None) -> None:
    """The whole life of a rank that is not the leader: join, load, run the leader's plans until the order to stop.

    Blocking. Raises whatever went wrong, a lost leader included; the process should end then.
    """
    from holdfast.worker.engine.model_runner import ModelRunner, follow

    with loading():
        device = device or default_device(config, rank)
        prepare_process(config, device)
    group = join(config, rank, rendezvous, device)
    try:
        with loading():
            runner = ModelRunner.load(config, group, device=device)
        follow(runner, group)
        runner.close()
    finally:
        group.close()


def join(
    config: WorkerConfig,
    rank: int,
    rendezvous: Rendezvous,
    device: "torch.device",
    listener: RankListener | None = None,
) -> "DistributedGroup":
    """Meets the other ranks. Blocks until all are there. The leader brings its `listener`."""
    from holdfast.worker.executors.tensor_parallel import DistributedGroup

    backend: Literal["nccl", "sockets"] = "sockets"
    if device.type == "cuda":
        backend = "nccl"
        if rendezvous.host == LOOPBACK:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # NCCL's own sockets have no authentication
    size = config.parallel.tensor_parallel_size
    return DistributedGroup(rank, size, rendezvous, backend=backend, device=device, listener=listener)


def default_device(config: WorkerConfig, rank: int) -> "torch.device":
    """The device of a rank whose process sees all devices of the machine."""
    import torch

    wanted = config.model.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", rank) if wanted == "cuda" else torch.device("cpu")


def with_device(config: WorkerConfig, device: "torch.device") -> WorkerConfig:
    """The settings for the other ranks: `auto` is replaced by the leader's choice, since a rank might choose
    differently.
    """
    return config.model_copy(update={"model": config.model.model_copy(update={"device": device.type})})


def prepare_process(config: WorkerConfig, device: "torch.device") -> None:
    """Before a rank computes anything: its share of the cores, and its GPU.

    Ranks times threads never exceed the cores.
    """
    import torch

    set_aside()  # three quarters of all objects are torch's
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.parallel.num_threads or max(1, cores // config.parallel.tensor_parallel_size))
    if device.type == "cuda":
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # NCCL's own verdict would end the process
        torch.cuda.set_device(device)


class LocalLauncher:
    """Starts ranks as child processes of this one. They end with it.

    Plain interpreters rather than `multiprocessing`, which would run the caller's script again in every child.
    """

    meeting_host = LOOPBACK

    def launch(self, config: WorkerConfig, rendezvous: Rendezvous) -> "LocalRanks":
        ranks = range(1, config.parallel.tensor_parallel_size)
        return LocalRanks({rank: _start(config, rank, rendezvous) for rank in ranks})


class LocalRanks:
    """Child processes, watched through their file descriptors by a thread that closes them when the first has ended."""

    def __init__(self, processes: dict[int, "subprocess.Popen[bytes]"]) -> None:
        self._processes = processes
        self._ids = [ProcessId.of(process.pid) for process in processes.values()]  # none of them has been waited for
        self._first_end: Future[str] = Future()
        self._oom_kills = oom_kills()
        watches = {os.pidfd_open(process.pid): rank for rank, process in processes.items()}
        threading.Thread(target=self._watch, args=(watches,), name="local-ranks", daemon=True).start()

    def wait(self) -> str:
        return self._first_end.result()

    def stop(self) -> None:
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_GRACE_S)
        self.kill()

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
            assert process.stdin is not None, "it is a pipe"
            process.stdin.close()

    def processes_here(self) -> list[ProcessId]:
        return self._ids

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._ids]

    def _watch(self, watches: dict[int, int]) -> None:
        poll = select.poll()  # unlike `select`, it takes descriptors of any number
        for watch in watches:
            poll.register(watch, select.POLLIN)
        ended = sorted(watches[watch] for watch, _ in poll.poll())
        for watch in watches:
            os.close(watch)
        codes = [f"rank {rank} ended with code {self._processes[rank].wait()}" for rank in ended]
        starved = "; the kernel has ended a process for want of memory" if oom_kills() > self._oom_kills else ""
        self._first_end.set_result(", ".join(codes) + starved)


_CHILD = "import sys; sys.path[:] = {path!r}; from holdfast.worker.replica.rank import run_child; run_child()"


def _start(config: WorkerConfig, rank: int, rendezvous: Rendezvous) -> "subprocess.Popen[bytes]":
    """The secret goes through a pipe: everyone on the machine may read a command line."""
    command = [sys.executable, "-c", _CHILD.format(path=sys.path), str(rank), config.model_dump_json()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None, "it is a pipe"
    with suppress(BrokenPipeError):  # it has ended, which is seen by its exit code
        process.stdin.write(json.dumps(asdict(rendezvous)).encode() + b"\n")
        process.stdin.flush()
    return process


def run_child() -> None:
    """The program of a child process: `rank config`. Its standard input gives the rendezvous in a line of JSON, and
    stays open as long as its parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the leader handles it
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(sys.stdin.fileno(), 1) or sys.exit(1)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    rank, config = sys.argv[1:]
    try:
        run_rank(WorkerConfig.model_validate_json(config), int(rank), Rendezvous(**json.loads(line)))
    except Exception as error:
        is_bug = not isinstance(error, HoldfastError | OSError)
        logger.error("rank %s ended: %s", rank, error, exc_info=is_bug)
        raise SystemExit(1) from error


def _end_with_parent() -> None:
    """A killed leader must leave no orphan, wherever this rank is stuck just then."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)

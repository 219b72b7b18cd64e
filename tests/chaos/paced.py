"""Ranks whose steps can be timed, and starved, from outside; and the fork that makes a second one."""

import logging
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from benchmarks.free_port import pick_port
from holdfast.worker.config import WorkerConfig
from holdfast.worker.distributed.rendezvous import Rendezvous
from holdfast.worker.distributed.tensor_parallel import DistributedGroup, Message, SingleRank
from holdfast.worker.engine.model_runner import ModelRunner, follow

logger = logging.getLogger(__name__)

WORKSPACE_BYTES = 64 * 2**20
"""What a step of a larger model takes for a moment: so much that it comes from the system, not from what was freed."""

HOST = "127.0.0.1"


class PacedRank(SingleRank):
    """A group of one whose steps take at least `step_s`, so that faults can be timed to a token from outside.

    They also take, and give back, the memory that steps of a larger model need.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def broadcast(self, message: Message | None) -> Message:
        time.sleep(self._step_s)
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8)
        return super().broadcast(message)


class PacedGroup(DistributedGroup):
    """The same of two ranks; the leader sets the pace, and the memory is taken on both."""

    def __init__(self, rank: int, rendezvous: Rendezvous, step_s: float) -> None:
        super().__init__(rank, 2, rendezvous)
        self._step_s = step_s

    def broadcast(self, message: Message | None) -> Message:
        if self.rank == 0:
            time.sleep(self._step_s)
        order = super().broadcast(message)
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8)
        return order


class ForkedRank:
    """The `Ranks` of a group of two: a child of the leader, which ends when the leader or itself fails."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._end = os.pidfd_open(pid)

    @classmethod
    def start(cls, live: Callable[[], None]) -> "ForkedRank":
        pid = os.fork()
        if pid == 0:
            try:
                live()
            except Exception as error:
                logger.error("rank 1 ended: %s", error)
            finally:
                os._exit(1)
        return cls(pid)

    def wait(self) -> str:
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        poll.poll()
        return "rank 1 ended"

    def stop(self) -> None:
        self.kill()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._end, signal.SIGKILL)


def two_ranks(
    config: WorkerConfig, step_s: float, on_birth: Callable[[], None]
) -> tuple[ModelRunner, PacedGroup, ForkedRank]:
    """A leader, loaded and checked, and the other one. `on_birth` is called in the other one's process. Blocking."""
    rendezvous, device = Rendezvous.at(HOST, pick_port(HOST)), torch.device("cpu")

    def live() -> None:
        on_birth()
        group = PacedGroup(1, rendezvous, step_s)
        follow(ModelRunner.load(config, group, device=device), group)

    rank = ForkedRank.start(live)
    group = PacedGroup(0, rendezvous, step_s)
    return ModelRunner.load(config, group, device=device), group, rank

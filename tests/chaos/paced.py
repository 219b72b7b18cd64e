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
from holdfast.worker.engine.model_runner import ModelRunner, follow
from holdfast.worker.executors.rendezvous import Rendezvous
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.step_sampler import HeadOutput
from holdfast.worker.executors.tensor_parallel import DistributedGroup

logger = logging.getLogger(__name__)

WORKSPACE_BYTES = 64 * 2**20
"""What a step of a larger model takes for a moment: so much that it comes from the system, not from what was freed."""

HOST = "127.0.0.1"


class PacedRunner(ModelRunner):
    """A rank whose steps take at least `step_s` where it leads, so that faults can be timed to a token from outside.

    They also take, and give back, the memory that steps of a larger model need.
    """

    step_s = 0.0
    """Set once it is loaded: the steps of its self-check take no longer than they need."""
    before_step: Callable[[], object] | None = None

    def execute(self, batch: StepBatch) -> HeadOutput:
        time.sleep(self.step_s)
        if self.before_step is not None:
            self.before_step()
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8)
        return super().execute(batch)

    def take_part(self, batch: StepBatch) -> None:
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8)
        super().take_part(batch)


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


def two_ranks(config: WorkerConfig, on_birth: Callable[[], None]) -> tuple[PacedRunner, DistributedGroup, ForkedRank]:
    """A leader, loaded and checked, and the other one. `on_birth` is called in the other one's process. Blocking."""
    rendezvous, device = Rendezvous.at(HOST, pick_port(HOST)), torch.device("cpu")

    def live() -> None:
        on_birth()
        group = DistributedGroup(1, 2, rendezvous)
        follow(PacedRunner.load(config, group, device=device), group)

    rank = ForkedRank.start(live)
    group = DistributedGroup(0, 2, rendezvous)
    return PacedRunner.load(config, group, device=device), group, rank

"""Runs steps on one rank: the leader's and the followers' sides of it, and the check before the first request.

What may live here: one step's way through a rank, and the orders between ranks. What may not: what a step should
contain (`scheduler.py`), how a model is loaded (`loading.py`), and processes (`rank.py`).
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker.config import WorkerConfig
from worker.errors import UnsupportedModelError
from worker.kv_cache import KVCache
from worker.loading import Parts, load_parts
from worker.model_info import ModelInfo
from worker.plan import StepPlan, StepResult
from worker.sampler import draw, draws_of
from worker.self_check import SelfCheck
from worker.step_batch import StepBatch
from worker.tensor_parallel import Message, TensorParallelGroup

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called as `progress(phase, done, total)`; phases are `load` and `check`."""

_KEEP_ALIVE: Final = 0
_STOP: Final = -1
"""A message that is no step is one such number; a step starts with its number of sequences, at least 1."""

_REFUSED, _BITS_DIFFER, _BITS_EQUAL = range(3)
"""What came of the self check, as the leader tells the others."""


class ModelRunner:
    """One rank of a loaded model. Used by one thread at a time."""

    def __init__(self, parts: Parts, rank: int) -> None:
        self.info: ModelInfo = parts.info
        """The same on all ranks."""
        self._model = parts.model
        self._context = parts.context
        self._is_leader = rank == 0

    @classmethod
    def load(
        cls,
        config: WorkerConfig,
        group: TensorParallelGroup,
        progress: Progress | None = None,
        device: torch.device | None = None,
    ) -> "ModelRunner":
        """Loads this rank's share of the model and checks it. All ranks of the group call this together; blocking.

        Raises `ConfigurationError` or `UnsupportedModelError`, on every rank, where the model cannot be served so.
        """
        progress = progress or _silent
        parts = load_parts(config, group, device or _device_of(config), progress)
        runner = cls(parts, group.rank)
        row_invariant = _self_check(runner, group, parts.cache, progress) and parts.tiles.report.row_invariant
        if not row_invariant:
            logger.warning("on this machine a token's last bits depend on its batch: replays may differ")
        runner.info = replace(parts.info, row_invariant=row_invariant)
        return runner

    def execute(self, batch: StepBatch) -> Tensor | None:
        """Runs one step. The leader gets the logits [rows wanted, vocab] in float32, the others None."""
        with torch.inference_mode():
            self._context.begin(batch)
            logits = self._model(batch)
            return logits.float() if self._is_leader else None


class LeaderRunner:
    """Runs plans on all ranks of a replica: what the engine calls."""

    def __init__(self, runner: ModelRunner, group: TensorParallelGroup) -> None:
        self._runner = runner
        self._group = group

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step everywhere and draws. Raises `ReplicaError` if a rank is lost."""
        drawn = iter(draw(self.logits(plan), draws_of(plan)))
        token_ids = tuple(
            tuple(next(drawn) for _ in range(sequence.num_draws if sequence.draw else 0)) for sequence in plan.sequences
        )
        return StepResult(step_id=plan.step_id, token_ids=token_ids)

    def logits(self, plan: StepPlan) -> Tensor:
        """Runs one step everywhere; the logits [rows wanted, vocab], in float32."""
        message = self._group.broadcast(StepBatch.pack(plan))
        logits = self._runner.execute(StepBatch.unpack(message))
        assert logits is not None, "rank 0 is the leader"
        return logits

    def keep_alive(self) -> None:
        """Shows idle followers a live leader."""
        self._group.broadcast(_order(_KEEP_ALIVE))

    def close(self) -> None:
        """Tells the followers to stop."""
        self._group.broadcast(_order(_STOP))


def follow(runner: ModelRunner, group: TensorParallelGroup) -> None:
    """Runs the steps that the leader orders, until it says stop. Raises `ReplicaError` if the leader is lost."""
    while (message := group.broadcast(None))[0] != _STOP:
        if message[0] != _KEEP_ALIVE:
            runner.execute(StepBatch.unpack(message))


def _self_check(runner: ModelRunner, group: TensorParallelGroup, cache: KVCache, progress: Progress) -> bool:
    """Whether rows are invariant, bit for bit. The leader runs the check; the others follow. The cache ends clean."""
    leader = LeaderRunner(runner, group)
    check = SelfCheck(runner.info, leader.logits, lambda *done: progress("check", *done))
    refusal: UnsupportedModelError | None = None
    if group.rank == 0:
        try:
            outcome = _BITS_EQUAL if check.passes_bitwise() else _BITS_DIFFER
        except UnsupportedModelError as error:
            outcome, refusal = _REFUSED, error
        leader.close()
        group.broadcast(_order(outcome))
    else:
        follow(runner, group)
        outcome = int(group.broadcast(None)[0])
    for layer in cache.layers:
        layer.keys[check.block_ids] = 0
        layer.values[check.block_ids] = 0
    if outcome == _REFUSED:
        raise refusal or UnsupportedModelError(runner.info.model_type, "the leader refused it", "See its message")
    return outcome == _BITS_EQUAL


def _order(number: int) -> Message:
    return np.array([number], dtype=np.int64)


def _device_of(config: WorkerConfig) -> torch.device:
    if config.model.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.model.device)


def _silent(phase: str, done: int, total: int) -> None:
    pass

"""What ranks, as processes or threads, do with whole models: steps of two sequences, and ways to be lost."""

import hashlib
import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.cpu import exchange
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.tensor_parallel import DistributedGroup, TensorParallelGroup
from holdfast.worker.models.native_backend import NativeBackend, make_backend
from holdfast.worker.step_plan import ScheduledSequence, StepPlan
from tests.worker.executors.models import config_of, layout_of, prepared

MODELS = ("llama", "mixtral", "gemma2", "gemma4_text", "glm4_moe, groups", "glm4_moe_lite", "ministral3")
BLOCK_SIZE = 16
NUM_BLOCKS = 32
MAX_LEN = 200
STEPS = ((20, 0), (7, 1), (1, 13), (1, 1), (1, 0), (100, 1), (1, 1))
"""Tokens of the first and the second sequence in each step. The sixth has more rows than fit in at first."""

TOKENS = torch.randint(3, 126, (2, MAX_LEN), generator=torch.Generator().manual_seed(5)).tolist()


def build(model: str, group: TensorParallelGroup, **changes: Any) -> NativeBackend:
    """A tiny model, ready for steps."""
    sizes = {"max_model_len": MAX_LEN, "block_size": BLOCK_SIZE}
    with torch.inference_mode():
        model_of_rank = prepared(layout_of(config_of(model, **changes), group, torch.bfloat16), group, **sizes)
        backend = make_backend(model_of_rank, group, **sizes)
    assert isinstance(backend, NativeBackend), backend
    backend.allocate_cache(NUM_BLOCKS, BLOCK_SIZE)
    return backend


def batches(steps: tuple[tuple[int, int], ...] = STEPS, rows: int | None = None) -> list[StepBatch]:
    """`rows`: how many rows of a sequence are wanted, if not all."""
    done, result = [0, 0], []
    for counts in steps:
        sequences = []
        for number, count in enumerate(counts):
            first, end = done[number], done[number] + count
            if count:
                blocks = range(number, number + 2 * -(-end // BLOCK_SIZE), 2)
                wanted = count if rows is None else min(rows, count)
                tokens = tuple(TOKENS[number][first:end])
                sequences.append(
                    ScheduledSequence(
                        sequence_id=number,
                        first_position=first,
                        token_ids=tokens,
                        block_ids=tuple(blocks),
                        draw=None,
                        num_draws=wanted,
                    )
                )
            done[number] = end
        result.append(StepBatch.of(StepPlan(step_id=0, others=tuple(sequences))))
    return result


def all_bits(backend: NativeBackend) -> str:
    """Names the bits of the logits of all rows, then of those of a few, of none, and of all again."""
    seen = hashlib.sha256()
    for batch in (batch for rows in (None, 2, 0, None) for batch in batches(rows=rows)):
        logits = backend.run(batch, with_logits=True).logits
        assert logits is not None
        seen.update(logits.numpy().tobytes())
    return seen.hexdigest()


def all_best(backend: NativeBackend) -> list[list[int] | None]:
    """The argmax of each row wanted, the last of each sequence among them."""
    return [backend.run(batch, with_logits=False).best for batch in batches(rows=9)]


def bits_of_models(group: TensorParallelGroup) -> dict[str, Any]:
    """For each model its bits, its greedy tokens, and whether ranks shared memory in the end."""
    result = {}
    for model in MODELS:
        backend = build(model, group)
        bits, best = all_bits(backend), all_best(backend)
        result[model] = (bits, best, backend.executor.shares_memory)
        backend.close()
    return result


def without_collectives(group: DistributedGroup) -> list[int]:
    """How often a step gathers otherwise than through shared memory, once its buffers are made."""
    backend = build("llama", group)
    all_bits(backend)
    calls: list[int] = []
    gather: Callable[..., torch.Tensor] = group.all_gather

    def counted(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        calls[-1] += 1
        return gather(x, dim)

    group.all_gather = counted  # type: ignore[method-assign]
    for with_logits in (True, False):
        calls.append(0)
        backend.run(batches()[0], with_logits=with_logits)
    backend.close()
    return calls


def refused(group: TensorParallelGroup) -> tuple[str, bool]:
    """One rank may not open the memory."""
    opened = exchange._map

    def refuse(path: str, num_bytes: int) -> Any:
        raise PermissionError(path)

    if group.rank == 1:
        exchange._map = refuse
    backend = build("llama", group)
    result = all_bits(backend), backend.executor.shares_memory
    exchange._map = opened
    backend.close()
    return result


def lost(group: TensorParallelGroup, how: signal.Signals) -> list[str]:
    """Rank 1 kills or stops itself between steps; whoever hears of it lets it go on."""
    pids = group.all_gather(torch.tensor([os.getpid()]), dim=0).tolist()
    backend = build("llama", group)
    heard: list[str] = []
    for number, batch in enumerate(batches(STEPS[:5])):
        if group.rank == 1 and number == 2:
            os.kill(os.getpid(), how)
        try:
            backend.run(batch, with_logits=False)
        except ReplicaError as error:
            heard.append(str(error))
    if how == signal.SIGSTOP and group.rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    backend.close()
    return heard

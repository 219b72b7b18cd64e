"""Warm-up of a GPU executor: decode steps are captured and kernels compiled before requests wait for them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor

from holdfast.worker.executors.gpu.graphs import buckets_up_to
from holdfast.worker.executors.gpu.sampler import DeviceSampler, plain_draws
from holdfast.worker.executors.gpu.step_inputs import StepInputs
from holdfast.worker.executors.step_batch import StepBatch

L = TypeVar("L")


class Launching(Protocol[L]):
    """Executor that runs steps on a device."""

    def launch(self, batch: StepBatch, *, with_logits: bool) -> L: ...

    def logits_to_draw_from(self, launched: L) -> Tensor | None: ...


def capture_decode_steps(
    executor: Launching[L], inputs: StepInputs, sampler: DeviceSampler, max_rows: int, meet: Callable[[], None]
) -> None:
    """Captures all graphs of decode steps of up to `max_rows` sequences: of those that end in tokens, in logits, and in
    draws. Ranks `meet` after each number of rows. Overwrites the first block of the cache.
    """
    for num_rows in buckets_up_to(max_rows):
        logits = None
        for batch in inputs.batches_of_graphs(num_rows):
            logits = executor.logits_to_draw_from(executor.launch(batch, with_logits=True))
            executor.launch(batch, with_logits=False)
            batch.draws = partial(plain_draws, num_rows)
            executor.launch(batch, with_logits=True)
        if logits is not None:
            sampler.warm_up(logits)
        meet()


def compile_pending(executor: Launching[L], sampler: DeviceSampler, block_size: int) -> None:
    """Compiles what puts tokens into the next step: the best token of the step before, and one that the leader draws.
    Overwrites the first block of the cache.
    """
    batch = StepBatch.decoding(1, 1, block_size)
    after = replace(batch, token_ids=batch.token_ids - 1)
    executor.launch(batch, with_logits=False)
    logits = executor.logits_to_draw_from(executor.launch(after, with_logits=True))
    if logits is not None:
        sampler.launch(logits, plain_draws(1))
    executor.launch(after, with_logits=False)

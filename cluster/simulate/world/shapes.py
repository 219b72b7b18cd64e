"""Shapes of the simulated replicas of a seed: batch and cache sizes, states, windows, step times."""

import random
from dataclasses import replace

from holdfast.cluster.simulate.actors.replica_link import ReplicaShape
from holdfast.cluster.simulate.oracle.pseudo_model import EOS_TOKEN_ID, VOCAB_SIZE
from holdfast.cluster.simulate.oracle.pseudo_runner import PseudoRunner
from holdfast.cluster.simulate.world.part_rng import part_rng
from holdfast.worker.config import SchedulerConfig
from holdfast.worker.model_info import TILE_TOKENS, Window, sequence_blocks
from holdfast.worker.scheduler.step_time import StepCosts


def draw_shape(rng: random.Random, seed: int, *, async_scheduling: bool) -> ReplicaShape:
    """A shape with full attention. States are on CPUs, where steps are planned in turn: none with async scheduling."""
    shape = _draw_plain(rng, async_scheduling)
    if async_scheduling:
        return shape
    slots = part_rng("states", seed).choice((0, 0, 2, shape.scheduler.max_num_seqs, 64))
    return _with_one_memory(part_rng("one memory", seed), replace(shape, num_state_slots=slots))


def _draw_plain(rng: random.Random, async_scheduling: bool) -> ReplicaShape:
    block_size = rng.choice((1, 2, 4, 8))
    max_model_len = rng.choice((32, 48))
    max_num_seqs = rng.choice((2, 8, 16, 32))
    # Sizes from a cache that a single sequence can fill to a cache with room for all.
    num_slots = max_model_len * rng.choice((1, 2, 4, max_num_seqs))
    return ReplicaShape(
        scheduler=SchedulerConfig(
            max_num_batched_tokens=rng.choice((4, 16, 64, 256)),
            max_num_seqs=max_num_seqs,
            max_num_waiting=rng.choice((4, 1024, 1024, 1024)),
            tenant_shares=rng.choice(({}, {"gold": 4.0})),
            async_scheduling=async_scheduling,
        ),
        num_blocks=-(-num_slots // block_size),
        block_size=block_size,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
        vocab_size=VOCAB_SIZE,
        prefix_caching=rng.random() < 0.8,
        step_costs=StepCosts(
            base_s=rng.uniform(0.005, 0.05), decode_s=0.0, token_s=rng.choice((0.0, 0.0002)), context_token_s=0.0
        ),
        make_runner=PseudoRunner,
        num_drafts=rng.choice((1, 2, 4, 8)),
    )


def _with_one_memory(rng: random.Random, shape: ReplicaShape) -> ReplicaShape:
    """The states of most models that keep some lie in the place of blocks."""
    if not shape.num_state_slots or rng.random() > 2 / 3:
        return shape
    state_blocks = rng.choice((1, 3))
    num_blocks = shape.num_blocks + rng.choice((1, 2, 8)) * state_blocks
    return replace(shape, num_blocks=num_blocks, num_state_slots=num_blocks // state_blocks, state_blocks=state_blocks)


def with_window(seed: int, shape: ReplicaShape) -> ReplicaShape:
    """Most shapes without states and async scheduling get a window, and sequences that leave it behind."""
    rng = part_rng("window", seed)
    if shape.scheduler.async_scheduling or shape.num_state_slots or rng.random() > 2 / 3:
        return shape
    window = Window.beside(shape.block_size, rng.choice((3, 8, 20)), rng.choice((1, 2)) * shape.block_size)
    length = 2 * TILE_TOKENS + 48
    num_blocks = sequence_blocks(length, shape.block_size, window) * rng.choice((1, 2, 4, shape.scheduler.max_num_seqs))
    scheduler = shape.scheduler.model_copy(update={"max_num_batched_tokens": rng.choice((64, 256))})
    return replace(shape, scheduler=scheduler, window=window, max_model_len=length, num_blocks=num_blocks)

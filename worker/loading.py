"""From settings to the parts of a runner, in order: model, size of the cache, cache, facts.

What may live here: the order, and the full step that a GPU is measured with. What may not: running requests.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath

import torch

from worker.attention.paged import AttentionContext, PagedAttention
from worker.checkpoint_digest import checkpoint_digest
from worker.checks import choose_max_model_len
from worker.config import SchedulerConfig, WorkerConfig
from worker.errors import ConfigurationError
from worker.kv_cache import KVCache
from worker.memory import (
    MIN_BLOCKS,
    check_num_blocks,
    choose_num_blocks,
    cpu_cache_bytes,
    default_block_size,
    gpu_cache_bytes,
    kv_bytes_per_token,
    smallest_of_all_ranks,
)
from worker.model import RankModel, build_rank_model, serving_dtype
from worker.model_info import ModelInfo
from worker.parallelize import Target
from worker.plan import DrawParams, ScheduledSequence, StepPlan
from worker.row_tiles import RowTiles
from worker.step_batch import StepBatch
from worker.tensor_parallel import TensorParallelGroup
from worker.weights import read_config, read_eos_token_ids, resolve_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a runner is made of."""

    model: RankModel
    context: AttentionContext
    cache: KVCache
    tiles: RowTiles
    info: ModelInfo


def load_parts(
    config: WorkerConfig, group: TensorParallelGroup, device: torch.device, progress: Callable[[str, int, int], None]
) -> Parts:
    """Loads this rank's share. All ranks of the group call this together; `info.row_invariant` is not known yet.

    Raises `ConfigurationError` or `UnsupportedModelError` where the model cannot be served so.
    """
    folder = resolve_model(config.model.model, with_weights=config.model.load_format != "dummy")
    hf_config = read_config(folder)
    max_model_len = choose_max_model_len(hf_config, config.model.max_model_len)
    target = Target(group=group, tiles=RowTiles(device), device=device, dtype=serving_dtype(config.model, hf_config))
    model = build_rank_model(config.model, folder, hf_config, target, lambda *done: progress("load", *done))
    if getattr(hf_config, "kv_lora_rank", None):
        logger.warning("latent attention is cached expanded, which takes many times the memory of the latents")
    cache = _allocate_cache(config, model, target, max_model_len)
    num_tokens = cache.num_blocks * cache.block_size
    if num_tokens < max_model_len:
        logger.warning("the KV cache holds %d tokens, and the model could use %d", num_tokens, max_model_len)
    info = ModelInfo(
        name=config.model.served_model_name or PurePath(config.model.model).name,
        path=str(folder),
        model_type=hf_config.model_type,
        max_model_len=max_model_len,
        vocab_size=hf_config.vocab_size,
        eos_token_ids=read_eos_token_ids(folder, hf_config),
        dtype=str(target.dtype).removeprefix("torch."),
        tensor_parallel_size=group.size,
        block_size=cache.block_size,
        num_blocks=cache.num_blocks,
        kv_bytes_per_token=kv_bytes_per_token(model.specs, target.dtype),
        row_invariant=False,
        device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        checkpoint_digest=checkpoint_digest(folder),
    )
    return Parts(model=model, context=_attach(model, cache, target), cache=cache, tiles=target.tiles, info=info)


def _attach(model: RankModel, cache: KVCache, target: Target) -> AttentionContext:
    context = AttentionContext(cache, target.tiles)
    model.attach(lambda layer: PagedAttention(context, layer))
    return context


def _allocate_cache(config: WorkerConfig, model: RankModel, target: Target, max_model_len: int) -> KVCache:
    """The cache, with the same number of blocks on every rank."""
    block_size = config.cache.block_size or default_block_size(target.device)
    block_bytes = kv_bytes_per_token(model.specs, target.dtype) * block_size
    useful_blocks = None
    if config.cache.num_blocks is not None or config.cache.kv_cache_memory is not None:
        default_bytes = 0
    elif target.device.type == "cuda":
        activations = _activation_bytes(config.scheduler, model, target, block_size, max_model_len)
        default_bytes = gpu_cache_bytes(target.device, activations, config.cache.gpu_memory_utilization)
    else:
        default_bytes = cpu_cache_bytes()
        useful_blocks = max(MIN_BLOCKS, config.scheduler.max_num_seqs * -(-max_model_len // block_size))
    chosen = choose_num_blocks(config.cache, default_bytes, block_bytes, useful_blocks)
    num_blocks = smallest_of_all_ranks(chosen, target.group, target.device)
    check_num_blocks(num_blocks, block_bytes)  # only now: all ranks come to the same answer
    logger.info("KV cache: %d blocks of %d tokens, %d MiB", num_blocks, block_size, num_blocks * block_bytes >> 20)
    try:
        return KVCache.allocate(model.specs, num_blocks, block_size, target.dtype, target.device)
    except ValueError as error:
        raise ConfigurationError(f"cache.{error}") from error


def _activation_bytes(
    config: SchedulerConfig, model: RankModel, target: Target, block_size: int, max_model_len: int
) -> int:
    """What the fullest step needs on a GPU besides weights and cache, measured with a cache just large enough."""
    plan = full_step(config, block_size, max_model_len)
    num_blocks = sum(len(sequence.block_ids) for sequence in plan.sequences)
    cache = KVCache.allocate(model.specs, num_blocks, block_size, target.dtype, target.device)
    context = _attach(model, cache, target)
    batch = StepBatch.unpack(StepBatch.pack(plan))
    torch.cuda.reset_peak_memory_stats(target.device)
    before = torch.cuda.memory_allocated(target.device)
    with torch.inference_mode():
        context.begin(batch)
        model(batch).float()
    peak = torch.cuda.max_memory_allocated(target.device) - before
    model.detach()
    del context, cache
    torch.cuda.empty_cache()
    return peak


def full_step(config: SchedulerConfig, block_size: int, max_model_len: int) -> StepPlan:
    """A step that uses up the budgets of tokens and of draws, with sequences as long as they may be."""
    greedy = DrawParams(seed=0, first_output_index=0, temperature=0.0, top_k=0, top_p=1.0)
    sequences: list[ScheduledSequence] = []
    num_draws, num_blocks, left = config.max_num_seqs, 0, config.max_num_batched_tokens
    while left > 0:
        count = min(left, max_model_len)
        needed = -(-count // block_size)
        draws = min(num_draws, count)
        sequence = ScheduledSequence(
            sequence_id=len(sequences),
            first_position=0,
            token_ids=(0,) * count,
            block_ids=tuple(range(num_blocks, num_blocks + needed)),
            draw=greedy if draws else None,
            num_draws=draws,
        )
        sequences.append(sequence)
        num_draws, num_blocks, left = num_draws - draws, num_blocks + needed, left - count
    return StepPlan(step_id=0, sequences=tuple(sequences))

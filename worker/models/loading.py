"""Model loading: from settings to a loaded model, in order: model, size of the cache, cache, model info."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from holdfast.worker.config import ModelConfig, WorkerConfig
from holdfast.worker.draws import DrawParams
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.cpu.executor import CpuExecutor
from holdfast.worker.executors.layout_arithmetic import largest_share, uneven_shares_notice
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.model_info import ModelInfo, Window, sequence_blocks
from holdfast.worker.models.backend import Backend, BlockCache, LoadedBackend, load_backend
from holdfast.worker.models.checkpoint_scheme import quantization_of
from holdfast.worker.models.checks import check_heads, check_kv_cache_dtype, check_own_dtype
from holdfast.worker.models.coded_bytes import memory_of_weights
from holdfast.worker.models.draft_model import DraftModel
from holdfast.worker.models.encoders import check_settings
from holdfast.worker.models.formats.gguf_folder import source_of
from holdfast.worker.models.formats.quantization_rule import NOT_QUANTIZED, rule_name
from holdfast.worker.models.memory import (
    StateRoom,
    check_block_size,
    check_memory,
    check_num_blocks,
    check_weights,
    choose_num_blocks,
    cpu_cache_bytes,
    default_block_size,
    gpu_cache_bytes,
    memory_left,
    smallest_of_all_ranks,
    useful_blocks,
)
from holdfast.worker.models.native_backend import NativeBackend
from holdfast.worker.models.next_token import NextTokenLayer
from holdfast.worker.models.parallelize import Target
from holdfast.worker.models.pooling import Pooler, check_pooled, load_pooler
from holdfast.worker.models.quantized_activations import check_quantized_activations
from holdfast.worker.models.text_model import served_config, text_model_notice
from holdfast.worker.models.weight_files import checkpoint_digest
from holdfast.worker.models.weights import model_folder, read_json, tokenizer_folder
from holdfast.worker.process_memory import available_memory
from holdfast.worker.sampling_params import SamplingParams
from holdfast.worker.scheduler.prompt_outputs import MAX_PROMPT_LOGPROBS
from holdfast.worker.scheduler.speculation import max_num_draws
from holdfast.worker.step_plan import ScheduledSequence, StepPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """One rank's share of a loaded model, with its cache, for a model runner."""

    backend: Backend
    cache: BlockCache
    info: ModelInfo
    draft: DraftModel | NextTokenLayer | None
    """On the leading rank of a replica that has one."""
    pooler: Pooler | None
    """Pooling, of a model that does not generate text."""


def check_ranks(config: WorkerConfig) -> None:
    """Raises `UnsupportedModelError` for more ranks than can share the model's heads: before any of them is started."""
    folder = model_folder(config.model, with_weights=False)
    found = served_config(read_json(folder / "config.json"), folder)
    if isinstance(found.get("num_attention_heads"), int):
        named = SimpleNamespace(**{"model_type": "?", **found})
        check_heads(named, config.parallel.tensor_parallel_size, may_be_uneven=True)  # loading sees the rest


def load_model(
    config: WorkerConfig, group: TensorParallelGroup, device: torch.device, progress: Callable[[str, int, int], None]
) -> LoadedModel:
    """Loads this rank's share. All ranks of the group call this together; `info.row_invariant` is not known yet.

    Raises `ConfigurationError` or `UnsupportedModelError` where the model cannot be served so.
    """
    check_kv_cache_dtype(config, device.type)
    check_quantized_activations(config.model, device.type)
    check_block_size(config.cache.block_size or default_block_size(device), device)
    has_weights = config.model.load_format != "dummy"
    folder = model_folder(config.model, with_weights=has_weights)
    check_pooled(config.model, folder)
    if has_weights:
        _check_room(config, folder, group, device)
    if group.rank == 0 and (notice := text_model_notice(folder)) is not None:
        logger.info("%s: %s", config.model.name, notice)
    loaded = load_backend(config, folder, group, device, progress)
    backend, facts, target = loaded.backend, loaded.facts, loaded.target
    check_own_dtype(config, str(target.dtype).removeprefix("torch."))
    pooler = _load_pooler(config, folder, backend)
    draft = _load_draft(config, folder, loaded)
    block_size, window = _block_sizes(config, backend, target, facts.max_model_len)
    room = _state_room(config, backend, target, block_size, window)
    cache = _allocate_cache(config, backend, draft, target, facts.max_model_len, room, block_size, window)
    if draft is not None:
        draft.allocate_cache(cache.num_blocks, cache.block_size)
    info = ModelInfo(
        model=config.model.name,
        path=str(source_of(tokenizer_folder(config.model, folder))),
        model_type=facts.model_type,
        chat_template=config.model.chat_template or "",
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=frozenset(facts.eos_token_ids),
        dtype=str(target.dtype).removeprefix("torch."),
        tensor_parallel_size=group.size,
        block_size=cache.block_size,
        num_blocks=cache.num_blocks,
        kv_bytes_per_token=backend.block_bytes(block_size, window) // block_size,
        window_tokens=0 if window is None else window.num_tokens,
        window_block_size=0 if window is None else window.block_size,
        num_state_slots=room.num_slots(cache.num_blocks),
        state_blocks=room.state_blocks,
        state_bytes=backend.state_bytes(config.speculation.max_num_drafts),
        quantization=quantization_of(folder, config.model.quantization) if has_weights else NOT_QUANTIZED,
        weight_bytes=memory_of_weights(config.model, folder, device.type) if has_weights else 0,
        row_invariant=False,
        device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        executor=f"{backend.numerics}+{backend.sampler.numerics}",
        checkpoint_digest=checkpoint_digest(folder, _weight_changes(config.model)),
        release=_release(),
        pooling=None if pooler is None else pooler.facts,
    )
    if info.most_tokens < facts.max_model_len:
        logger.warning("the cache holds %d tokens, and the model could use %d", info.most_tokens, facts.max_model_len)
    return LoadedModel(backend=backend, cache=cache, info=info, draft=draft, pooler=pooler)


def _load_pooler(config: WorkerConfig, folder: Path, backend: Backend) -> Pooler | None:
    """Pooling of the model, if its states are pooled. Raises `ConfigurationError` where that is not possible."""
    pooler = load_pooler(config.model, folder)
    if pooler is None:
        return None
    if not (isinstance(backend, NativeBackend) and isinstance(backend.executor, CpuExecutor)):
        raise ConfigurationError(
            f"model.model = {config.model.model!r}: states are pooled by the native backend on CPUs alone "
            "(docs/embeddings.md); set model.runner = 'generate' to have text generated"
        )
    if pooler.facts.is_whole:
        check_settings(config)
    if config.speculation.speculative != "none":
        raise ConfigurationError(
            f"speculation.speculative = {config.speculation.speculative!r}: must be none: a pooled model draws nothing"
        )
    return pooler


def _weight_changes(config: ModelConfig) -> dict[str, Any]:
    """Changes that settings make to a checkpoint's weights, for their digest."""
    of_weights = {} if config.quantization is None else {"quantization": rule_name(config.quantization)}
    return {**config.hf_overrides, **of_weights}


def _check_room(config: WorkerConfig, folder: Path, group: TensorParallelGroup, device: torch.device) -> None:
    """All ranks come to the same answer: that of the one with the least room."""
    share = int(memory_of_weights(config.model, folder, device.type) * _largest_share(folder, group))
    check_weights(share, smallest_of_all_ranks(memory_left(device), group, device), config.model.model)


def _largest_share(folder: Path, group: TensorParallelGroup) -> float:
    """The fraction of the weights on the rank that has most, by config.json. The leader says where shares differ."""
    size = group.size
    found = served_config(read_json(folder / "config.json"), folder)
    heads = found.get("num_attention_heads")
    kv_heads = found.get("num_key_value_heads") or heads
    if not (isinstance(heads, int) and isinstance(kv_heads, int) and heads > 0 and kv_heads > 0):
        return 1 / size
    share = largest_share(heads, kv_heads, size)
    if share > 1 / size and group.rank == 0:
        logger.warning("%s", uneven_shares_notice(heads, kv_heads, size))
    return share


def _release() -> str:
    """The release of this code; empty in a checkout that is not installed."""
    try:
        return version("holdfast")
    except PackageNotFoundError:
        return ""


def reloaded_config(config: WorkerConfig, info: ModelInfo, folder: str) -> WorkerConfig:
    """The settings to load other weights by: a cache of the same size, and no draft model, for there is one."""
    found = {"model": folder, "served_model_name": info.model, "max_model_len": info.max_model_len}
    found |= {"load_format": "auto", "revision": None, "tokenizer": info.path}
    block_size = min(info.block_size, info.window_block_size or info.block_size)
    cache = {"num_blocks": info.num_blocks, "block_size": block_size, "kv_cache_memory": None}
    cache |= {"num_state_slots": None if info.state_blocks else info.num_state_slots or None}
    speculation = config.speculation
    if speculation.speculative == "draft":  # states keep room for the same number of drafts as before
        drafts = {"speculative": "ngram", "num_speculative_tokens": speculation.max_num_drafts}
        speculation = speculation.model_copy(update=drafts)
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=found),
            "cache": config.cache.model_copy(update=cache),
            "speculation": speculation,
        }
    )


def check_same_model(served: ModelInfo, other: ModelInfo) -> None:
    """Raises `ConfigurationError` unless they differ in their weights alone: requests and caches belong to the rest."""
    for name in ("model_type", "vocab_size", "max_model_len", "eos_token_ids", "dtype", "executor", "pooling"):
        old, new = getattr(served, name), getattr(other, name)
        if old != new:
            raise ConfigurationError(f"weights of another model cannot be taken: its {name} is {new}, not {old}")


def _load_draft(config: WorkerConfig, folder: Path, loaded: LoadedBackend) -> DraftModel | NextTokenLayer | None:
    """Drafter, whole, on the leading rank: it is small, and ranks that wait for it cost less than its sums."""
    speculation, target, facts = config.speculation, loaded.target, loaded.facts
    if speculation.speculative == "mtp":
        leads = target.group.rank == 0
        return NextTokenLayer.load(config, folder, loaded.backend, facts.max_model_len, leads=leads)
    if speculation.speculative != "draft":
        return None
    if speculation.draft_model is None:
        raise ConfigurationError(f"speculation.draft_model: {config.model.model} has no built-in draft model; name one")
    if target.group.rank > 0:
        return None
    executor = loaded.backend.executor if isinstance(loaded.backend, NativeBackend) else None
    pool = executor.pool if isinstance(executor, CpuExecutor) else None
    return DraftModel.load(config, folder, facts.vocab_size, target, pool)


def _state_room(
    config: WorkerConfig, backend: Backend, target: Target, block_size: int, window: Window | None
) -> StateRoom:
    """Room for states, the same on every rank: the number of slots that all can have, of the number of blocks that any
    needs.
    """
    state_bytes = backend.state_bytes(config.speculation.max_num_drafts)
    if not state_bytes:
        return StateRoom()
    own = StateRoom.of(config, cpu_cache_bytes(), state_bytes, backend.block_bytes(block_size, window))
    own_slots = smallest_of_all_ranks(own.own_slots, target.group, target.device)
    return StateRoom(own_slots, -smallest_of_all_ranks(-own.state_blocks, target.group, target.device))


def _block_sizes(
    config: WorkerConfig, backend: Backend, target: Target, max_model_len: int
) -> tuple[int, Window | None]:
    """Tokens of a block, and the separate blocks of layers with a sliding window, the same on every rank."""
    smallest = config.cache.block_size or default_block_size(target.device)
    block_size, window = backend.block_sizes(smallest, max_model_len)
    if window is None or config.cache.kv_offload_disk is not None:  # which keeps blocks by the prefix of all layers
        return smallest, None
    block_size, own = (
        smallest_of_all_ranks(size, target.group, target.device) for size in (block_size, window.block_size)
    )
    return block_size, Window.beside(block_size, window.num_tokens, own)


def _allocate_cache(
    config: WorkerConfig,
    backend: Backend,
    draft: DraftModel | NextTokenLayer | None,
    target: Target,
    max_model_len: int,
    room: StateRoom,
    block_size: int,
    window: Window | None,
) -> BlockCache:
    """The cache, with the same number of blocks on every rank, and memory left for the draft model's and for states."""
    num_drafts = config.speculation.max_num_drafts
    state_bytes = room.own_slots * backend.state_bytes(num_drafts)
    draft_bytes = draft.kv_bytes_per_token if draft is not None else 0
    block_bytes = backend.block_bytes(block_size, window) + draft_bytes * block_size
    most_blocks = None
    if config.cache.num_blocks is not None or config.cache.kv_cache_memory is not None:
        default_bytes = 0
    elif target.device.type == "cuda":
        activations = _activation_bytes(config, backend, target, block_size, max_model_len)
        default_bytes = gpu_cache_bytes(target.device, activations, config.cache.gpu_memory_utilization)
    else:
        default_bytes = cpu_cache_bytes()
        longest = sequence_blocks(max_model_len, block_size, window) + room.state_blocks
        most_blocks = useful_blocks(config, longest)
    chosen = choose_num_blocks(config.cache, default_bytes, block_bytes, most_blocks, state_bytes)
    num_blocks = smallest_of_all_ranks(chosen, target.group, target.device)
    smallest = sequence_blocks(block_size, block_size, window) + room.state_blocks
    check_num_blocks(num_blocks, block_bytes, smallest)  # only now: all ranks come to the same answer
    if target.device.type == "cpu":
        left_bytes = smallest_of_all_ranks(available_memory(), target.group, target.device)
        check_memory(num_blocks, block_bytes, left_bytes - state_bytes)
    logger.info("KV cache: %d blocks of %d tokens, %d MiB", num_blocks, block_size, num_blocks * block_bytes >> 20)
    if window is not None:
        logger.info("layers with a window of %d tokens: blocks of %d tokens", window.num_tokens, window.block_size)
    try:
        cache = backend.allocate_cache(num_blocks, block_size, window)
    except ValueError as error:
        raise ConfigurationError(f"cache.{error}") from error
    if num_slots := room.num_slots(num_blocks):
        own = f"{state_bytes >> 20} MiB" if room.own_slots else f"each in the place of {room.state_blocks} blocks"
        logger.info("states: %d slots, %s", num_slots, own)
        backend.allocate_states(num_slots, num_drafts)
    if room.state_blocks:
        cache.take_late()
    elif config.cache.kv_cache_memory is not None:
        cache.want_all()
    return cache


def _activation_bytes(
    config: WorkerConfig, backend: Backend, target: Target, block_size: int, max_model_len: int
) -> int:
    """Bytes that the fullest step needs on a GPU besides weights and cache, measured with a cache just large enough."""
    plan = full_step(config, block_size, max_model_len)
    backend.allocate_cache(sum(len(sequence.block_ids) for sequence in plan.sequences), block_size)
    batch = StepBatch.of(plan)
    torch.cuda.reset_peak_memory_stats(target.device)
    before = torch.cuda.memory_allocated(target.device)
    backend.run(batch, with_logits=True)
    peak = torch.cuda.max_memory_allocated(target.device) - before
    backend.drop_cache()
    torch.cuda.empty_cache()
    return peak


def full_step(config: WorkerConfig, block_size: int, max_model_len: int) -> StepPlan:
    """A step that uses up the budgets of tokens and of rows of logits, with sequences as long as they may be."""
    greedy = DrawParams(SamplingParams(seed=0, temperature=0.0), 0)
    sequences: list[ScheduledSequence] = []
    num_draws, num_blocks = max_num_draws(config.scheduler, config.speculation) + MAX_PROMPT_LOGPROBS, 0
    left = config.scheduler.max_num_batched_tokens
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
    return StepPlan(step_id=0, others=tuple(sequences))

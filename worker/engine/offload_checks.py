"""Checks of the settings that keep evicted blocks, before there is a store."""

import torch

from holdfast.worker.config import WorkerConfig
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.kv_cache import BlockMemory
from holdfast.worker.models.memory import memory_left
from holdfast.worker.process_memory import readable_bytes

_MEMORY = "cache.kv_offload_memory"
_DISK = "cache.kv_offload_disk"


def check_offload(config: WorkerConfig, memory: BlockMemory | None, num_ranks: int) -> None:
    """Raises `ConfigurationError` if this model or machine cannot keep blocks as the settings ask. `memory`: the
    executor's, None if its blocks cannot be copied.
    """
    cache = config.cache
    if cache.offload_folder_and_bytes is not None:
        if memory is None or memory.is_on_device:
            raise ConfigurationError(f"{_DISK}: only the native executor on CPUs can keep blocks on a disk")
        _check_turns(config, _DISK)
        if config.model.load_format == "dummy":
            raise ConfigurationError(f"{_DISK}: random weights (load_format = 'dummy') have no name to keep blocks by")
        _check_drafts(config, _DISK)
    if cache.kv_offload_memory is not None:
        _check_memory(config, memory, num_ranks, cache.kv_offload_memory)


def _check_memory(config: WorkerConfig, memory: BlockMemory | None, num_ranks: int, num_bytes: int) -> None:
    if memory is not None and not memory.is_on_device:
        raise ConfigurationError(
            f"{_MEMORY}: on a CPU the cache lies in the host's memory itself; give it more by cache.kv_cache_memory"
        )
    if memory is None:
        raise ConfigurationError(f"{_MEMORY}: only the native executor can copy blocks, and this model runs on another")
    if num_ranks > 1:
        raise ConfigurationError(f"{_MEMORY}: must be unset with parallel.tensor_parallel_size = {num_ranks}")
    _check_turns(config, _MEMORY)
    _check_drafts(config, _MEMORY)
    left = memory_left(torch.device("cpu"))
    if num_bytes > left:
        wanted = readable_bytes(num_bytes)
        raise ConfigurationError(f"{_MEMORY} = {wanted}: must be at most the {readable_bytes(left)} that are available")


def _check_turns(config: WorkerConfig, setting: str) -> None:
    if config.scheduler.async_scheduling:
        raise ConfigurationError(f"{setting}: blocks are copied between steps; scheduler.async_scheduling must be off")


def _check_drafts(config: WorkerConfig, setting: str) -> None:
    if config.speculation.speculative in ("draft", "mtp"):
        raise ConfigurationError(f"{setting}: what a draft model caches is not kept; choose ngram or suffix")

"""Backend of a rank, the native backend or the HF backend: runs the steps of the rank's share of a model."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from holdfast.worker.config import WorkerConfig
from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.executors.cpu.library import load_library
from holdfast.worker.executors.cpu.pool import NativePool
from holdfast.worker.executors.finite import NotFiniteError
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.step_sampler import HeadOutput, StepSampler
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.model_info import Window
from holdfast.worker.models.checks import OTHER_ENGINE, check_kv_cache_dtype, check_latents, kv_cache_dtype_refused
from holdfast.worker.models.damaged_weights import damaged
from holdfast.worker.models.encoders import check_has_native_backend
from holdfast.worker.models.executor_protocols import MultiStepExecutor, OverlappingExecutor
from holdfast.worker.models.families import FAMILIES
from holdfast.worker.models.hf_backend import HfBackend
from holdfast.worker.models.memory import default_block_size
from holdfast.worker.models.model import build_rank_model, serving_dtype
from holdfast.worker.models.model_facts import ModelFacts, facts_of
from holdfast.worker.models.native_backend import UNIT_NUMERICS, make_backend, prepare
from holdfast.worker.models.parallelize import Target
from holdfast.worker.models.proof import made_if_small
from holdfast.worker.models.quantized_activations import refused
from holdfast.worker.models.stated_layout import read_stated
from holdfast.worker.models.weight_files import weight_files
from holdfast.worker.models.weights import read_config, read_json
from holdfast.worker.progress import ProgressCounter

logger = logging.getLogger(__name__)

_LARGE_BYTES: Final = 2 << 30
"""Bytes of weights above which a proof does not convert them to float32: that is work for all cores."""


class BlockCache(Protocol):
    """The memory of a backend's keys and values, by blocks."""

    num_blocks: int
    block_size: int

    def copy(self, sources: Tensor, destinations: Tensor, num_tokens: Tensor) -> None:
        """Copies the first `num_tokens` slots of blocks to other ones in all layers."""
        ...

    def clear(self, block_ids: Tensor) -> None:
        """Writes zeros over these blocks in all layers."""
        ...

    def want_all(self) -> None:
        """Says that all blocks are meant to be used: their memory may be taken from the system before."""
        ...

    def take_late(self) -> None:
        """Says that states may be in the place of blocks: memory is taken where it is written to, and never before."""
        ...


class Backend(Protocol):
    """Runs the steps of one rank. All ranks of a group make the same calls."""

    progress: ProgressCounter
    """Moves with every layer of every step."""

    @property
    def sampler(self) -> StepSampler:
        """Reads the leader's logits."""
        ...

    @property
    def numerics(self) -> str:
        """Names the order of its arithmetic: backends of different numerics differ in their bits."""
        ...

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of this rank's cache, all layers together."""
        ...

    def block_sizes(self, block_size: int, max_model_len: int) -> tuple[int, Window | None]:
        """Tokens of a block, and the separate blocks of layers with a sliding window; None: as much as all.
        `block_size` are the fewest, `max_model_len` the tokens of the longest sequence.
        """
        ...

    def block_bytes(self, block_size: int, window: Window | None) -> int:
        """Bytes of a block on this rank."""
        ...

    def allocate_cache(self, num_blocks: int, block_size: int, window: Window | None = None) -> BlockCache:
        """The cache that steps use from now on. Raises ValueError where the block size does not fit."""
        ...

    def state_bytes(self, num_drafts: int) -> int:
        """Bytes of a sequence's state on this rank, all layers together, if a step has up to this many drafts of it; 0:
        the model keeps none.
        """
        ...

    def allocate_states(self, num_slots: int, num_drafts: int) -> None:
        """The slots that steps use from now on, of a model that keeps states. After `allocate_cache`."""
        ...

    def drop_cache(self) -> None:
        """Frees the cache; another is allocated before the next step."""
        ...

    def warm_up(self, max_rows: int) -> None:
        """Does the one-time work of decode steps of up to `max_rows` sequences in advance. Overwrites the first
        block.
        """
        ...

    def run(self, batch: StepBatch, *, with_logits: bool) -> HeadOutput:
        """One step. The leader's output counts; others may return less."""
        ...

    @property
    def multi_step(self) -> MultiStepExecutor | None:
        """Executor whose batches may be for several steps (`StepBatch.num_steps`), on all ranks or none."""
        ...

    @property
    def overlapping(self) -> OverlappingExecutor | None:
        """Executor that runs two steps at a time, if the device does."""
        ...

    def close(self) -> None:
        """Frees threads and memory. Nothing is run after it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBackend:
    """A backend, and the facts of its model."""

    backend: Backend
    facts: ModelFacts
    target: Target


def load_backend(
    config: WorkerConfig,
    folder: Path,
    group: TensorParallelGroup,
    device: torch.device,
    progress: Callable[[str, int, int], None],
    pool: NativePool | None = None,
) -> LoadedBackend:
    """Loads this rank's share of the model in `folder`. All ranks of the group do so together. `pool`: the threads that
    run a native backend on CPUs, if they are not its own.

    Raises `UnsupportedModelError` where a gate refuses the model, or where it must run as a native backend and cannot;
    `Unavailable` on a CPU that does not run the native library, which draws for both backends.
    """
    if device.type == "cpu":
        load_library(None)  # before anything large is read; compiles it if there is none
    try:
        return _backend(config, folder, group, device, progress, pool)
    except NotFiniteError as found:
        raise damaged(folder, found) from None


def _backend(
    config: WorkerConfig,
    folder: Path,
    group: TensorParallelGroup,
    device: torch.device,
    progress: Callable[[str, int, int], None],
    pool: NativePool | None,
) -> LoadedBackend:
    stated = _stated(config, folder, group, device, progress, pool)
    _check_units(config, stated)
    if isinstance(stated, LoadedBackend):
        return stated
    return _on_hf_backend(config, folder, group, device, progress, stated)


def _check_units(config: WorkerConfig, stated: LoadedBackend | str) -> None:
    """Raises `ConfigurationError` where products in units are asked for and there are none."""
    if config.model.quantized_activations == "int8":
        if isinstance(stated, str):
            raise refused(f"the model has no native backend: {stated} (docs/quantization.md)")
        if UNIT_NUMERICS not in stated.backend.numerics:
            raise refused("none of its weights has units of 32 inputs with a scale each (docs/quantization.md)")


def _stated(
    config: WorkerConfig,
    folder: Path,
    group: TensorParallelGroup,
    device: torch.device,
    progress: Callable[[str, int, int], None],
    pool: NativePool | None,
) -> LoadedBackend | str:
    """The native backend of a model of a stated family; or the reason why there is none."""
    if config.model.executor == "hf":
        return "model.executor = 'hf'"
    read = read_stated(config.model, folder, group, device)
    layout, facts, reason = (None, None, read) if isinstance(read, str) else (made_if_small(read[0]), read[1], None)
    block_size = config.cache.block_size or default_block_size(device)
    max_model_len = 1 if facts is None else facts.max_model_len
    with _few_threads(folder, device):
        prepared = prepare(layout, reason, group, max_model_len=max_model_len, block_size=block_size, device=device)
    if isinstance(prepared, str):
        return prepared
    assert facts is not None
    check_latents(config, facts.model_type)
    progress("load", 1, 1)
    backend = make_backend(
        prepared,
        group,
        max_model_len=max_model_len,
        block_size=block_size,
        device=device,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        pool=pool,
    )
    if isinstance(backend, str):
        return backend
    target = Target(group=group, device=device, dtype=prepared.layout.dtype)
    return LoadedBackend(backend=backend, facts=facts, target=target)


def _on_hf_backend(
    config: WorkerConfig,
    folder: Path,
    group: TensorParallelGroup,
    device: torch.device,
    progress: Callable[[str, int, int], None],
    reason: str,
) -> LoadedBackend:
    """The backend of a model whose Hugging Face modules run, for a `reason`."""
    check_has_native_backend(str(read_json(folder / "config.json").get("model_type")), reason)
    hf_config = read_config(folder, config.model.config_changes)
    check_kv_cache_dtype(config, device.type, hf_config)
    facts = facts_of(hf_config, folder, config.model.max_model_len)
    _check_hf_backend_will_do(config, facts, hf_config, reason)
    logger.info("runs on the HF backend: %s", reason)
    if getattr(hf_config, "kv_lora_rank", None):
        logger.warning("latent attention is cached expanded, which takes many times the memory of the latents")
    target = Target(group=group, device=device, dtype=serving_dtype(config.model, hf_config))
    with _few_threads(folder, device):
        model = build_rank_model(config.model, folder, hf_config, target, lambda *done: progress("load", *done))
    hf_backend = HfBackend.settled(
        model,
        target,
        max_positions=facts.max_model_len,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        progress=lambda *done: progress("pack", *done),
    )
    return LoadedBackend(backend=hf_backend, facts=facts, target=target)


def _check_hf_backend_will_do(config: WorkerConfig, facts: ModelFacts, hf_config: Any, reason: str) -> None:
    """Whether a model without a native backend may still be served."""
    if getattr(hf_config, "num_kv_shared_layers", 0):
        reason = f"layers share the keys and values of others, which only the native backend on CPUs does ({reason})"
        raise UnsupportedModelError(facts.model_type, reason, OTHER_ENGINE)
    if facts.model_type in FAMILIES and FAMILIES[facts.model_type].keeps_state:
        reason = f"its layers keep a state, which only the native backend on CPUs has slots for ({reason})"
        raise UnsupportedModelError(facts.model_type, reason, OTHER_ENGINE)
    if config.model.executor == "native":
        raise UnsupportedModelError(facts.model_type, f"no native backend: {reason}", OTHER_ENGINE)
    if config.cache.kv_cache_dtype == "fp8":
        raise kv_cache_dtype_refused(config, f"{facts.model_type} has no native backend here: {reason}")


@contextmanager
def _few_threads(folder: Path, device: torch.device) -> Iterator[None]:
    """Inside it, torch computes on one thread if the model is small.

    Its threads wait for each other, busily, for longer than a few rows take; beside other processes for much longer.
    """
    usual = torch.get_num_threads()
    num_bytes = sum(path.stat().st_size for path in weight_files(folder))
    if device.type == "cpu" and num_bytes < _LARGE_BYTES:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)

"""Native backend of a rank: a stated model on an executor, in place of Hugging Face's modules."""

import logging
from importlib.util import find_spec
from typing import Final

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.config import KVCacheDtype
from holdfast.worker.executors.cpu.cache import MAX_HEAD_DIM, TiledCache
from holdfast.worker.executors.cpu.executor import CpuExecutor
from holdfast.worker.executors.cpu.pool import NativePool
from holdfast.worker.executors.cpu.tile_memory import linears
from holdfast.worker.executors.device_blocks import DeviceBlocks
from holdfast.worker.executors.gpu import weights
from holdfast.worker.executors.kv_cache import BlockMemory, KVCache
from holdfast.worker.executors.layout import DecoderLayout, Experts, LatentAttention
from holdfast.worker.executors.step_batch import StepBatch
from holdfast.worker.executors.step_sampler import OverlappingSampler
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.model_info import Window
from holdfast.worker.models.damaged_weights import made_by_all
from holdfast.worker.models.executor_protocols import Executor, MovableExecutor, MultiStepExecutor, OverlappingExecutor
from holdfast.worker.models.proof import NUM_TOKENS, Prepared, ask_reference, check
from holdfast.worker.progress import ProgressCounter

logger = logging.getLogger(__name__)

NUMERICS: Final = "native-2"
"""The order of all additions and roundings. A change that changes any bit of any output takes the next number."""

UNIT_NUMERICS: Final = "int8-units-4"
"""The rule of products in units (`executors/cpu/native/units.h`), beside those of a model that has some."""

_CPU: Final = torch.device("cpu")

_CODED_TOKENS: Final = 70
"""Over a tile of keys, and more than a narrow tile of queries."""


class NativeBackend:
    """One rank's share of a model on an executor. All ranks make the same calls."""

    def __init__(self, executor: Executor, numerics: str = NUMERICS) -> None:
        """`numerics` names the executor's order of adding."""
        self.executor = executor
        self.numerics = numerics
        self.sampler = executor.make_sampler()
        self.overlapping: OverlappingExecutor | None = None
        """Executor that runs two steps at a time, if the device runs them and draws their tokens (an
        `OverlappingSampler`), or they draw none."""
        draws = isinstance(self.sampler, OverlappingSampler) or isinstance(executor, CpuExecutor)
        if isinstance(executor, OverlappingExecutor) and draws:
            self.overlapping = executor if executor.overlaps else None
        self.multi_step = executor if isinstance(executor, MultiStepExecutor) else None
        """Executor that runs several steps on one batch, if this one can."""
        self.run = executor.run
        """Runs one step, as `Backend.run`."""
        self._windowed = executor if isinstance(executor, CpuExecutor) else None  # whose layers may give blocks back
        self._device_cache: KVCache | None = None  # the allocated cache, if it lies on a GPU
        self.progress = ProgressCounter()
        """Moves with every layer."""
        self.progress.follow(executor.layers_done)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.executor.kv_bytes_per_token

    def block_sizes(self, block_size: int, max_model_len: int) -> tuple[int, Window | None]:
        """Tokens of a block, and the separate blocks of layers with a sliding window, if they have some."""
        if self._windowed is None or self._windowed.state_bytes(0):
            return block_size, None
        return self._windowed.block_form.sizes(block_size, max_model_len)

    def block_bytes(self, block_size: int, window: Window | None) -> int:
        """Bytes of a block on this rank."""
        if self._windowed is None:
            return self.kv_bytes_per_token * block_size
        return self._windowed.block_form.block_bytes(block_size, window)

    def allocate_cache(self, num_blocks: int, block_size: int, window: Window | None = None) -> TiledCache | KVCache:
        """The cache that steps use. Raises ValueError where the block size does not fit."""
        if self._windowed is None:
            assert window is None, "the executor keeps all of every layer"
            cache = self.executor.allocate_cache(num_blocks, block_size)
            self._device_cache = cache if isinstance(cache, KVCache) else None
            return cache
        return self._windowed.allocate_cache(num_blocks, block_size, window)

    def state_bytes(self, num_drafts: int) -> int:
        """Bytes of a slot; 0: the model keeps no states."""
        return self.executor.state_bytes(num_drafts)

    def allocate_states(self, num_slots: int, num_drafts: int) -> None:
        """The slots that steps use, of a model that keeps states."""
        self.executor.allocate_states(num_slots, num_drafts)

    def block_memory(self) -> BlockMemory | None:
        """The caches, to be copied elsewhere and back; None where they cannot be."""
        if isinstance(self.executor, MovableExecutor):
            return self.executor.block_memory()
        if self._device_cache is None:
            return None
        form = f"device {[(pool.dtype, pool.shape[0], *pool.shape[2:]) for pool in self._device_cache.pools]}"
        return BlockMemory(blocks=DeviceBlocks(self._device_cache), form=form, is_on_device=True)

    def drop_cache(self) -> None:
        self._device_cache = None
        self.executor.drop_cache()

    def warm_up(self, max_rows: int) -> None:
        """Does the one-time work of decode steps of up to `max_rows` sequences in advance. Overwrites the first
        block.
        """
        self.executor.warm_up(max_rows)

    def close(self) -> None:
        self.sampler.close()
        self.executor.close()


def prepare(
    layout: DecoderLayout | None,
    reason: str | None,
    group: TensorParallelGroup,
    *,
    max_model_len: int,
    block_size: int,
    device: torch.device = _CPU,
) -> Prepared | str:
    """A rank's layout, or none for a `reason`, with the answers of the reference; or why it has no backend on `device`.

    All ranks of the group call this together and come to the same answer.
    """
    reason = _reason_of_any(layout, reason, group, block_size, device)
    if reason is not None:
        return reason
    assert layout is not None
    answers = ask_reference(layout, group, max_len=max_model_len)
    return answers if isinstance(answers, str) else Prepared(layout=layout, answers=answers)


def _reason_of_any(
    layout: DecoderLayout | None,
    reason: str | None,
    group: TensorParallelGroup,
    block_size: int,
    device: torch.device,
) -> str | None:
    """The reason why one of the ranks does not run its share: its layout failed for a `reason`, or none is
    supported.
    """
    if layout is not None:
        reason = _unfit_for(layout, device, group.size, block_size) or _unavailable(device)
    if not all_ranks(group, reason is None):
        return reason or "another rank does not run its share"
    return None


def _unavailable(device: torch.device) -> str | None:
    """Missing part that the native backend needs on a device; None: it can run."""
    if device.type == "cpu" or find_spec("triton"):
        return None
    return "Triton is not installed, which compiles the kernels for GPUs"


def make_backend(
    prepared: Prepared,
    group: TensorParallelGroup,
    *,
    max_model_len: int,
    block_size: int,
    device: torch.device = _CPU,
    kv_cache_dtype: KVCacheDtype = "auto",
    pool: NativePool | None = None,
) -> NativeBackend | str:
    """Packs a model and proves its executor on this machine; or returns the executor's error. Keys and values in
    int8 are for executors on CPUs alone, in fp8 for those on GPUs. `pool`: the threads of an executor on CPUs, if they
    are not its own.

    The memory of the layout's linears is given back while they are packed: afterwards only those in files can be read.
    All ranks of the group call this together and come to the same answer. Raises `Unavailable`, and `NotFiniteError`
    where a rank finds a weight with a NaN or an infinity.
    """
    layout = prepared.layout
    executor, numerics = made_by_all(
        lambda: _executor(layout, group, max_model_len, device, pool), group, lambda made: made[0].close()
    )
    provable = _Provable(executor, block_size)
    proof = check(provable, prepared.answers, group)
    if proof.reason is not None:
        executor.close()
        return proof.reason
    if kv_cache_dtype in ("int8", "fp8"):
        assert executor.kv_code == kv_cache_dtype, "others are refused before"
        tokens = np.zeros(min(_CODED_TOKENS, max_model_len), dtype=np.int64)
        reason = executor.kv_code_difference(provable.batch_of(tokens))
        if not all_ranks(group, reason is None):
            executor.close()
            return reason or f"keys and values in {kv_cache_dtype} differ on another rank"
        executor.keep_kv_in_code()
        numerics += f"+{executor.kv_code_numerics}"
    logger.info(
        "native backend on %s: errors are %.2f of the allowed error", executor.instruction_class, proof.model_error
    )
    return NativeBackend(executor, numerics)


def _executor(
    layout: DecoderLayout,
    group: TensorParallelGroup,
    max_positions: int,
    device: torch.device,
    pool: NativePool | None,
) -> tuple[Executor, str]:
    """The executor of a device, and the name of its order of adding."""
    if device.type == "cpu":
        threads = pool or torch.get_num_threads()
        executor = CpuExecutor(layout, group, max_positions=max_positions, threads=threads, uses_up=True)
        return executor, f"{NUMERICS}+{UNIT_NUMERICS}" if has_units(layout) else NUMERICS
    from holdfast.worker.executors.gpu.executor import NUMERICS as GPU_NUMERICS  # loads Triton
    from holdfast.worker.executors.gpu.executor import GpuExecutor

    return GpuExecutor(layout, group, max_positions=max_positions, device=device), GPU_NUMERICS


def has_units(layout: DecoderLayout) -> bool:
    """Whether any of its linears is multiplied in units."""
    return any(linear.units for linear in linears(layout))


def _unfit_for(layout: DecoderLayout, device: torch.device, tensor_parallel_size: int, block_size: int) -> str | None:
    if device.type == "cpu":
        return _unfit(layout)
    return weights.unfit(layout, tensor_parallel_size, block_size)


def _unfit(layout: DecoderLayout) -> str | None:
    """Part of a layout that the executor for CPUs does not run; None: it runs all."""
    for layer in layout.layers:
        attention = layer.attention
        if layer.state is not None and layer.parallel:
            return "a layer with a state has its MLP beside it"
        if isinstance(attention, LatentAttention):
            size = attention.key_dim
        else:
            size = 0 if attention is None else attention.head_dim
        if size > MAX_HEAD_DIM:
            return f"heads have {size} dimensions; the maximum is {MAX_HEAD_DIM}"
        if isinstance(layer.mlp, Experts) and _is_uneven(layer.mlp):
            return "the expert that all tokens share is cut into other slices than the others"
    return None


def _is_uneven(experts: Experts) -> bool:
    shared = experts.shared
    if experts.latent is not None:
        return False
    return shared is not None and (shared.num_slices != experts.experts[0].num_slices or shared.down.bias is not None)


def all_ranks(group: TensorParallelGroup, fine: bool) -> bool:
    """Whether all ranks are fine."""
    return bool(group.all_gather(torch.tensor([int(fine)]), dim=0).min())


class _Provable:
    """The executor for a proof: one short sequence, in a small separate cache."""

    def __init__(self, executor: Executor, block_size: int) -> None:
        self._executor = executor
        self._block_size = block_size
        self._cache = executor.allocate_cache(-(-NUM_TOKENS // block_size), block_size)
        self._has_state = executor.state_bytes(0) > 0
        if self._has_state:
            executor.allocate_states(1, 0)

    def run_layer(self, index: int, x: Tensor) -> Tensor:
        return self._executor.run_layer(index, x, self.batch_of(np.zeros(len(x), dtype=np.int64))).cpu()

    def run_model(self, token_ids: Tensor) -> Tensor | None:
        logits = self._executor.run(self.batch_of(token_ids.numpy()), with_logits=True).logits
        found = None if logits is None else logits.cpu()
        self._executor.free_logits()
        return found

    def batch_of(self, token_ids: np.ndarray) -> StepBatch:
        """The first tokens of a sequence."""
        count = len(token_ids)
        num_blocks = -(-count // self._block_size)
        return StepBatch(
            step_id=0,
            token_ids=token_ids,
            first_positions=np.zeros(1, dtype=np.int64),
            num_tokens=np.array([count]),
            num_draws=np.array([count]),
            block_ids=np.arange(num_blocks),
            num_blocks=np.array([num_blocks]),
            block_copies=np.zeros((3, 0), dtype=np.int64),
            logits_rows=np.arange(count),
            state_slots=np.zeros(int(self._has_state), dtype=np.int64),
            num_drafts=np.zeros(int(self._has_state), dtype=np.int64),
        )

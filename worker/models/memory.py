"""Memory of a model: its needs, estimated before it is loaded, and the number of KV-cache blocks of a rank. All
sizes are bytes of one rank; of the one with most, where shares differ.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from holdfast.worker.config import CacheConfig, WorkerConfig
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.cpu.cache import SUB_PAGE, BlockForm
from holdfast.worker.executors.cpu.states import VALUE_BYTES
from holdfast.worker.executors.kv_cache import KVSpec
from holdfast.worker.executors.tensor_parallel import TensorParallelGroup
from holdfast.worker.model_info import Window, sequence_blocks
from holdfast.worker.models.checkpoint_scheme import quantization_of
from holdfast.worker.models.checks import check_kv_cache_dtype, choose_max_model_len
from holdfast.worker.models.coded_bytes import CodedBytes, coded_bytes
from holdfast.worker.models.families import FAMILIES
from holdfast.worker.models.family_rules import head_dim, num_kv_heads
from holdfast.worker.models.model import choose_device, register_attention, serving_dtype
from holdfast.worker.models.parallel_plan import ParallelPlan, is_transposed_linear
from holdfast.worker.models.weights import build_hf_model, model_folder, read_config
from holdfast.worker.process_memory import available_memory, readable_bytes

CPU_CACHE_LIMIT: Final = 2**30
"""Maximum bytes of a rank's cache on a CPU without a setting, besides `CPU_CACHE_SHARE` of the available memory."""

CPU_CACHE_SHARE: Final = 0.1

PREFIX_CACHE_FACTOR: Final = 4
"""Ratio of a CPU's cache, with prefix caching, to what running sequences can use: three quarters are for prefixes of
earlier ones. A larger cache costs no time at the start (`worker/executors/cpu/cache.py`); its memory is bounded as
above."""

MIN_BLOCKS: Final = 2
"""The check before the first request runs two sequences side by side."""


WAYS_OUT: Final = (
    "lower --kv-cache-memory or --gpu-memory-utilization, raise --tp, or serve a smaller model (`holdfast estimate` "
    "says what one needs)"
)
"""Remedies for a model that does not fit."""


class MemoryEstimator:
    """Estimates the memory of a rank of a model from the config alone. Reads no weights and allocates none."""

    def __init__(self, config: WorkerConfig) -> None:
        """Raises as loading would where the config cannot be served."""
        folder = model_folder(config.model, with_weights=False)
        hf_config = read_config(folder, config.model.config_changes)
        self.quantization = quantization_of(folder, config.model.quantization)
        """Quantization of the weights, in words."""
        register_attention()
        model = build_hf_model(hf_config)
        size = config.parallel.tensor_parallel_size
        device = choose_device(config.model)
        family = FAMILIES.get(hf_config.model_type)
        is_native = family is not None and config.model.executor != "hf" and device.type == "cpu"
        may_be_uneven = is_native and family is not None and family.may_be_uneven
        plan = ParallelPlan(hf_config, model.tp_plan or {}, size, may_be_uneven=may_be_uneven)
        self.shares = plan.shares
        """Slices of the model that each rank has, where they differ."""
        dtype = serving_dtype(config.model, hf_config)
        self.max_model_len = choose_max_model_len(hf_config, config.model.max_model_len)
        self.block_size = config.cache.block_size or default_block_size(device)
        coded = coded_bytes(config.model, folder, device.type, hf_config.model_type)
        self.weight_bytes = _weight_bytes(model, plan, dtype, coded)
        check_kv_cache_dtype(config, device.type, hf_config)
        check_block_size(self.block_size, device)
        keeps_latents = is_native and family is not None and family.latent
        kept_by = filter(partial(_keeps_kv, hf_config), range(hf_config.num_hidden_layers))
        specs = [_latent_spec(hf_config) if keeps_latents else _kv_spec(hf_config, plan, layer) for layer in kept_by]
        form = BlockForm(specs, dtype, config.cache.kv_cache_dtype == "int8")
        self.window: Window | None = None
        """Window of layers with a sliding window, if they have separate blocks."""
        if device.type == "cpu":
            has_all = config.cache.kv_offload_disk is not None
            if is_native and family is not None and not (family.keeps_state or has_all):
                self.block_size, self.window = form.sizes(self.block_size, self.max_model_len)
            self.block_bytes = form.block_bytes(self.block_size, self.window)
        else:
            of_token = (
                spec.fp8_bytes_per_token
                if config.cache.kv_cache_dtype == "fp8"
                else spec.values_per_token * dtype.itemsize
                for spec in specs
            )
            self.block_bytes = self.block_size * sum(of_token)
        self.state_bytes = _state_bytes(hf_config, plan, config.speculation.max_num_drafts)
        """Bytes of a sequence's states; 0: the model keeps none."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token; with a `window`, of the layers that see all, as their blocks are filled up."""
        return self.block_bytes // self.block_size

    def default_cache_bytes(self, config: WorkerConfig, default_bytes: int, *, is_gpu: bool) -> int:
        """Memory of the cache that loading would choose where `default_bytes` are there for it."""
        room = self.state_room(config, default_bytes)
        needed = sequence_blocks(self.max_model_len, self.block_size, self.window) + room.state_blocks
        own = room.own_slots * self.state_bytes
        most_blocks = None if is_gpu else useful_blocks(config, needed)
        num_blocks = choose_num_blocks(config.cache, default_bytes, self.block_bytes, most_blocks, own)
        return num_blocks * self.block_bytes + own

    def state_room(self, config: WorkerConfig, default_bytes: int) -> "StateRoom":
        """Room for states as loading would choose it if `default_bytes` are there for the cache."""
        return StateRoom.of(config, default_bytes, self.state_bytes, self.block_bytes)

    def num_blocks(self, cache_bytes: int, room: "StateRoom | None" = None) -> int:
        """Blocks that fit into this much memory for the cache, beside slots in separate memory."""
        own = 0 if room is None else room.own_slots * self.state_bytes
        return max(0, cache_bytes - own) // max(1, self.block_bytes)

    def num_sequences(self, cache_bytes: int, num_tokens: int, room: "StateRoom | None" = None) -> int:
        """Sequences of `num_tokens`, prompt and output together, that fit at the same time."""
        num_blocks = self.num_blocks(cache_bytes, room)
        needed = sequence_blocks(num_tokens, self.block_size, self.window)
        if room is None or not self.state_bytes:
            return num_blocks // needed
        return min(num_blocks // (needed + room.state_blocks), room.num_slots(num_blocks))


def default_block_size(device: torch.device) -> int:
    """Tokens of a block where the settings name none."""
    return 64 if device.type == "cuda" else 16


def check_block_size(block_size: int, device: torch.device) -> None:
    """Refuses blocks that a device's cache does not have. Raises `ConfigurationError`."""
    if device.type == "cpu" and block_size % SUB_PAGE:
        raise ConfigurationError(
            f"cache.block_size = {block_size}: on a CPU it must be a multiple of {SUB_PAGE}; leave --block-size unset"
        )


def kv_bytes_per_token(specs: Sequence[KVSpec], dtype: torch.dtype) -> int:
    """Bytes of one token in the cache of one rank, all layers together."""
    return sum(spec.values_per_token for spec in specs) * dtype.itemsize


def cpu_cache_bytes() -> int:
    """A modest default on a CPU: a tenth of the available memory, and at most 1 GiB."""
    return min(CPU_CACHE_LIMIT, int(available_memory() * CPU_CACHE_SHARE))


def gpu_cache_bytes(device: torch.device, activation_bytes: int, utilization: float) -> int:
    """Bytes left of `utilization` of a GPU's memory after memory in use and a full step's needs."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total * utilization) - (total - free) - activation_bytes


def useful_blocks(config: WorkerConfig, longest: int) -> int:
    """Blocks above which a larger cache gains little, given the blocks of the longest sequence: for a small model, far
    fewer than fit into memory.
    """
    running = config.scheduler.max_num_seqs * longest
    return max(MIN_BLOCKS, running * (PREFIX_CACHE_FACTOR if config.cache.enable_prefix_caching else 1))


def choose_num_blocks(
    config: CacheConfig, default_bytes: int, block_bytes: int, most_blocks: int | None, state_bytes: int = 0
) -> int:
    """Blocks of this rank's cache: the set number, or the number that fits the set memory, or the default memory,
    beside `state_bytes` of states in separate memory.

    `most_blocks` bounds the default, since more would help little. The result may be too small to work with.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    num_bytes = default_bytes if config.kv_cache_memory is None else config.kv_cache_memory
    num_blocks = max(0, num_bytes - state_bytes) // max(1, block_bytes)
    if config.kv_cache_memory is not None:
        return num_blocks
    return num_blocks if most_blocks is None else min(num_blocks, most_blocks)


MIN_SLOTS: Final = 2
"""Like `MIN_BLOCKS`."""


@dataclass(frozen=True, slots=True)
class StateRoom:
    """Room for states of sequences: shared with blocks of keys and values, or in separate memory. Neither:
    the model keeps none.
    """

    own_slots: int = 0
    """Slots with separate memory: the set number, or all, if blocks have no size."""
    state_blocks: int = 0
    """Blocks that each other slot takes the place of: they weigh as much as a state, or a little more."""

    @classmethod
    def of(cls, config: WorkerConfig, default_bytes: int, state_bytes: int, block_bytes: int) -> "StateRoom":
        """On a rank with `default_bytes` for the cache, unless the settings give a number."""
        if not state_bytes:
            return cls()
        if config.cache.num_state_slots is not None:
            return cls(own_slots=config.cache.num_state_slots)
        if block_bytes:
            return cls(state_blocks=-(-state_bytes // block_bytes))
        cache_bytes = default_bytes if config.cache.kv_cache_memory is None else config.cache.kv_cache_memory
        useful = config.scheduler.max_num_seqs * (PREFIX_CACHE_FACTOR if config.cache.enable_prefix_caching else 1)
        return cls(own_slots=max(MIN_SLOTS, min(useful, cache_bytes // state_bytes)))

    def num_slots(self, num_blocks: int) -> int:
        """State slots besides this number of blocks, or in their place."""
        return self.own_slots or (num_blocks // self.state_blocks if self.state_blocks else 0)


def check_num_blocks(num_blocks: int, block_bytes: int, smallest: int) -> None:
    """Refuses a cache that is too small for `MIN_BLOCKS` sequences, of which the smallest takes this many blocks.
    Raises `ConfigurationError`.
    """
    fewest = MIN_BLOCKS * smallest
    if num_blocks < fewest:
        raise ConfigurationError(
            f"the KV cache would have {max(num_blocks, 0)} blocks of {block_bytes} bytes, and needs {fewest}; "
            "raise cache.num_blocks, cache.kv_cache_memory or cache.gpu_memory_utilization, or lower cache.block_size"
        )


def check_memory(num_blocks: int, block_bytes: int, available_bytes: int) -> None:
    """Refuses a cache that is larger than the memory that is left. Raises `ConfigurationError`."""
    if num_blocks * block_bytes > available_bytes:
        raise ConfigurationError(
            f"the KV cache would take {readable_bytes(num_blocks * block_bytes)} ({num_blocks} blocks of {block_bytes} "
            f"bytes), and {readable_bytes(available_bytes)} of memory are left; lower cache.kv_cache_memory or "
            "cache.num_blocks, or leave them unset"
        )


def check_weights(num_bytes: int, available_bytes: int, model: str) -> None:
    """Refuses weights, this rank's share of them, that are larger than the memory that is left, before they are read.

    Raises `ConfigurationError`.
    """
    if num_bytes > available_bytes:
        raise ConfigurationError(
            f"model.model = {model!r}: the weights of a rank take {readable_bytes(num_bytes)}, and "
            f"{readable_bytes(available_bytes)} of memory are left; {WAYS_OUT}"
        )


def memory_left(device: torch.device) -> int:
    """Bytes that a rank on this device can still get."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def is_failed_allocation(error: BaseException) -> bool:
    """Whether memory ran out: Python's, the system's, or a device's. Torch has no class for that of the CPU's."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def smallest_of_all_ranks(value: int, group: TensorParallelGroup, device: torch.device) -> int:
    """The same number on every rank, so that a block id means the same everywhere."""
    return int(group.all_gather(torch.tensor([value], device=device), dim=0).min())


def _weight_bytes(model: Any, plan: ParallelPlan, dtype: torch.dtype, coded: CodedBytes | None) -> int:
    tables = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    stored_dtype, total = model.dtype, 0.0
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        attention = model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
        shape = tuple(parameter.T.shape) if is_transposed_linear(owner) else tuple(parameter.shape)
        if id(parameter) in tables:
            share = -(-shape[0] // plan.size) / shape[0]
        else:
            cut = plan.cut(name, shape, getattr(attention, "head_dim", None))
            share = 1.0 if cut is None else cut.share
        itemsize: float = dtype.itemsize if parameter.dtype == stored_dtype else parameter.dtype.itemsize
        if coded is not None and (bits := coded.bits(name)) is not None:
            itemsize = bits / 8
        total += parameter.numel() * share * itemsize
    saved = model.state_dict()
    total += sum(buffer.nbytes for name, buffer in model.named_buffers() if name in saved)
    return int(total)


def _latent_spec(hf_config: Any) -> KVSpec:
    """Keys and values of a layer with latent attention on each rank, on the native backend."""
    key_dim = hf_config.kv_lora_rank + hf_config.qk_rope_head_dim
    return KVSpec(num_heads=hf_config.num_attention_heads, num_kv_heads=1, key_dim=key_dim, value_dim=0)


def _kv_spec(hf_config: Any, plan: ParallelPlan, layer: int) -> KVSpec:
    """Keys and values of a layer on a rank."""
    if getattr(hf_config, "qk_nope_head_dim", None):  # the HF backend caches latent attention expanded
        kv_heads = hf_config.num_attention_heads
        key_dim = hf_config.qk_nope_head_dim + hf_config.qk_rope_head_dim
        value_dim = hf_config.v_head_dim
    else:
        kv_heads = num_kv_heads(hf_config, layer)
        key_dim = value_dim = head_dim(hf_config, layer)
    if plan.shares is not None:
        local = kv_heads // sum(plan.shares) * max(plan.shares)
    else:
        local = max(1, kv_heads // plan.size) if plan.splits_attention else kv_heads
    family = FAMILIES.get(hf_config.model_type)
    window = None if family is None else family.window_of(hf_config, layer)
    return KVSpec(num_heads=local, num_kv_heads=local, key_dim=key_dim, value_dim=value_dim, sliding_window=window)


def _keeps_kv(hf_config: Any, layer: int) -> bool:
    family, types = FAMILIES.get(hf_config.model_type), getattr(hf_config, "layer_types", None)
    if family is None or not types:
        return True
    return family.keeps_kv(types[layer]) and family.kv_source(hf_config, layer) is None


def _state_bytes(hf_config: Any, plan: ParallelPlan, num_drafts: int) -> int:
    """Bytes of the states on the rank with the most channels or heads."""
    family = FAMILIES.get(hf_config.model_type)
    if family is None or not family.keeps_state:
        return 0
    lengths = [family.state_lengths[kind] for kind in hf_config.layer_types if kind in family.state_lengths]
    share = 1 / plan.size if plan.shares is None else max(plan.shares) / sum(plan.shares)
    return int(VALUE_BYTES * share * sum(length(hf_config, num_drafts) for length in lengths))

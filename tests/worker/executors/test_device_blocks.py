"""Blocks of a device's cache as rows of bytes, here of a cache in the host's memory, and settings that keep them."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from holdfast.worker.cache.memory_store import MemoryStore
from holdfast.worker.config import CacheConfig, ModelConfig, SchedulerConfig, WorkerConfig
from holdfast.worker.engine.block_mover import BlockMover
from holdfast.worker.engine.offload_checks import check_offload
from holdfast.worker.engine.tier_mover import KV, MoverEvents
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.device_blocks import DeviceBlocks
from holdfast.worker.executors.kv_cache import BlockMemory, KVCache, KVSpec
from holdfast.worker.replica.replica import _stepping

NUM_BLOCKS, BLOCK_SIZE = 12, 16
SPECS = (
    KVSpec(num_heads=4, num_kv_heads=2, key_dim=8, value_dim=8),
    KVSpec(num_heads=4, num_kv_heads=1, key_dim=24, value_dim=0),
    KVSpec(num_heads=4, num_kv_heads=2, key_dim=8, value_dim=8),
)


def cache_of(in_fp8: bool = False, seed: int = 0) -> KVCache:
    """A cache of random bytes."""
    cache = KVCache.allocate(SPECS, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16, "cpu", in_fp8=in_fp8)
    generator = torch.Generator().manual_seed(seed)
    for pool in cache.pools:
        raw = pool.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    return cache


def block(cache: KVCache, block_id: int) -> bytes:
    return b"".join(pool[:, block_id].contiguous().view(torch.uint8).numpy().tobytes() for pool in cache.pools)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_rows_hold_all_bytes_of_a_block_and_go_where_they_are_written(in_fp8):
    source, target = cache_of(in_fp8), cache_of(in_fp8, seed=1)
    rows, blocks = DeviceBlocks(source), DeviceBlocks(target)
    read = np.stack(rows.read([3, 7, 0]))
    assert [row.tobytes() for row in read] == [block(source, number) for number in (3, 7, 0)]
    assert read.shape == (3, rows.row_bytes)
    before = [block(target, number) for number in range(NUM_BLOCKS)]
    blocks.write([5, 1, 9], read)
    for number in range(NUM_BLOCKS):
        of = {5: 3, 1: 7, 9: 0}.get(number)
        assert block(target, number) == (before[number] if of is None else block(source, of))


def test_a_copy_stays_when_the_block_is_overwritten_or_others_are_read():
    cache = cache_of()
    rows = DeviceBlocks(cache)
    kept, wanted = rows.read([2]), block(cache, 2)
    rows.read([4])
    cache.clear(torch.tensor([2]))
    assert kept[0].tobytes() == wanted


class _Events:
    def __init__(self) -> None:
        self.came: list[bytes] = []
        self.pieces = threading.Semaphore(0)

    def events(self) -> MoverEvents:
        return MoverEvents(
            on_news=lambda came, gone: self.came.extend(came),
            on_piece=lambda ticket: self.pieces.release(),
            on_written=lambda: self.pieces.release(),
            on_failed=lambda ticket: None,
        )


def test_evicted_blocks_go_to_memory_and_come_back_with_the_same_bits():
    cache, heard = cache_of(in_fp8=True), _Events()
    mover = BlockMover(MemoryStore(1 << 24, clock=lambda: 0.0), {KV: DeviceBlocks(cache)})
    mover.start(heard.events())
    try:
        names, wanted = (
            [KV + bytes([number]) * 16 for number in range(3)],
            [block(cache, number) for number in range(3)],
        )
        mover.store(list(zip(names, range(3), strict=True)))
        assert heard.pieces.acquire(timeout=60)
        assert heard.came == names
        cache.clear(torch.arange(NUM_BLOCKS))
        mover.fetch(1, names, piece=3)
        assert heard.pieces.acquire(timeout=60)
        assert mover.take(1, list(zip(names, (8, 4, 6), strict=True))) == [True] * 3
        assert [block(cache, number) for number in (8, 4, 6)] == wanted
    finally:
        mover.close()


# --- settings ---


def config_of(**more) -> WorkerConfig:
    settings = {"cache": CacheConfig(kv_offload_memory=1 << 25)} | more
    return WorkerConfig(model=ModelConfig(model="m"), **settings)


ON_DEVICE = BlockMemory(blocks=DeviceBlocks(cache_of()), form="f", is_on_device=True)


@pytest.mark.parametrize(
    ("config", "memory", "num_ranks", "match"),
    [
        (
            config_of(),
            replace(ON_DEVICE, is_on_device=False),
            1,
            "kv_offload_memory: on a CPU .* cache.kv_cache_memory",
        ),
        (config_of(), None, 1, "only the native executor"),
        (config_of(), ON_DEVICE, 2, "tensor_parallel_size = 2"),
        (config_of(scheduler=SchedulerConfig(async_scheduling=True)), ON_DEVICE, 1, "async_scheduling must be off"),
        (config_of(cache=CacheConfig(kv_offload_memory=1 << 60)), ON_DEVICE, 1, "must be at most the .* available"),
        (config_of(cache=CacheConfig(kv_offload_disk="/x,1GB")), ON_DEVICE, 1, "kv_offload_disk: only .* on CPUs"),
        (
            config_of(cache=CacheConfig(kv_offload_disk="/x,1GB"), scheduler=SchedulerConfig(async_scheduling=True)),
            replace(ON_DEVICE, is_on_device=False),
            1,
            "kv_offload_disk: .*async_scheduling must be off",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(config, memory, num_ranks, match):
    with pytest.raises(ConfigurationError, match=match):
        check_offload(config, memory, num_ranks)


def test_what_can_be_kept_is_not():
    check_offload(config_of(), ON_DEVICE, 1)
    check_offload(config_of(cache=CacheConfig(kv_offload_disk="/x,1GB")), replace(ON_DEVICE, is_on_device=False), 1)
    check_offload(WorkerConfig(model=ModelConfig(model="m")), None, 4)


@pytest.mark.parametrize("config", [config_of(), WorkerConfig(model=ModelConfig(model="m"))])
def test_steps_are_planned_in_turn_while_blocks_are_kept_in_memory(config):
    leader = SimpleNamespace(overlaps=True)
    assert (_stepping(config, leader) is leader) == (config.cache.kv_offload_memory is not None)


@pytest.mark.parametrize("more", [{"kv_offload_disk": "/x,1GB"}, {"enable_prefix_caching": False}])
def test_settings_that_contradict_each_other_are_refused(more):
    with pytest.raises(ValueError, match="kv_offload_memory"):
        CacheConfig(kv_offload_memory=1 << 25, **more)

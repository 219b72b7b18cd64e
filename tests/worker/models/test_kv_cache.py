"""The memory of a GPU's cache: shaped by its layers, zero at first and when cleared; in fp8 with scales."""

import numpy as np
import pytest
import torch

from holdfast.worker.executors.kv_cache import KVCache, KVSpec

PLAIN = KVSpec(num_heads=4, num_kv_heads=2, key_dim=32, value_dim=32)
LATENT = KVSpec(num_heads=4, num_kv_heads=2, key_dim=48, value_dim=32)


def test_pools_are_zeroed_and_shaped_by_layer():
    cache = KVCache.allocate([PLAIN, LATENT], 5, 16, torch.bfloat16, "cpu")
    assert [layer.keys.shape for layer in cache.layers] == [(5, 16, 2, 32), (5, 16, 2, 48)]
    assert [layer.values.shape for layer in cache.layers] == [(5, 16, 2, 32), (5, 16, 2, 32)]
    starts = {t.data_ptr() for layer in cache.layers for t in (layer.keys, layer.values)}
    assert len(starts) == 4
    for layer in cache.layers:
        layer.keys.fill_(1)
        layer.values.fill_(1)
    cache.clear(torch.tensor([2, 4]))
    for layer in cache.layers:
        assert np.array_equal(layer.keys.flatten(1).float().amax(1), [1, 1, 0, 1, 0])
        assert np.array_equal(layer.values.flatten(1).float().amax(1), [1, 1, 0, 1, 0])


def test_copies_read_all_before_they_write_and_clear_what_lies_behind():
    cache = KVCache.allocate([PLAIN, LATENT], 4, 4, torch.float32, "cpu")
    for layer in cache.layers:
        for pool in (layer.keys, layer.values):
            pool.copy_(torch.arange(1, 17).reshape(4, 4, 1, 1).expand_as(pool))
            pool[0, 2:] = float("nan")
    cache.copy(*torch.tensor([[0, 1, 1], [1, 2, 3], [2, 4, 1]]))
    for layer in cache.layers:
        for pool in (layer.keys, layer.values):
            expected = torch.tensor([[1.0, 2, 0, 0], [5, 6, 7, 8], [5, 0, 0, 0]]).reshape(3, 4, 1, 1)
            assert torch.equal(pool[1:], expected.expand_as(pool[1:]))


def test_in_fp8_each_row_has_a_scale_which_goes_where_it_goes():
    cache = KVCache.allocate([PLAIN, LATENT], 4, 4, torch.bfloat16, "cpu", in_fp8=True)
    bytes_per_token = sum(spec.fp8_bytes_per_token for spec in (PLAIN, LATENT))
    pools = [pool for layer in cache.layers for pool in (layer.keys, layer.values)]
    scales = [pool for layer in cache.layers for pool in (layer.key_scales, layer.value_scales)]
    assert {pool.dtype for pool in pools + scales} == {torch.uint8}
    assert [pool.shape for pool in scales] == [(4, 2, 4)] * 4
    assert sum(pool.nbytes for pool in pools + scales) == 4 * 4 * bytes_per_token == 16 * (2 * 66 + 2 * 82)
    numbers = torch.arange(1, 17, dtype=torch.uint8).reshape(4, 4)
    for pool in pools:
        pool.copy_(numbers[:, :, None, None].expand_as(pool))
    for pool in scales:
        pool.copy_(numbers[:, None, :].expand_as(pool))
    cache.copy(*torch.tensor([[0, 1, 1], [1, 2, 3], [2, 4, 1]]))
    expected = torch.tensor([[1, 2, 0, 0], [5, 6, 7, 8], [5, 0, 0, 0]], dtype=torch.uint8)
    for pool in pools:
        assert torch.equal(pool[1:], expected[:, :, None, None].expand_as(pool[1:]))
    for pool in scales:
        assert torch.equal(pool[1:], expected[:, None, :].expand_as(pool[1:]))
    cache.clear(torch.tensor([0, 2]))
    assert not any(pool[[0, 2]].any() for pool in pools + scales)


@pytest.mark.parametrize("block_size", [3, 48, 96])
def test_a_block_holds_whole_tiles_or_a_tile_whole_blocks(block_size):
    with pytest.raises(ValueError, match="block_size"):
        KVCache.allocate([PLAIN], 4, block_size, torch.float32, "cpu")

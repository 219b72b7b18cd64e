"""Bytes of blocks in a CPU's caches: rows hold all layers of a block, and nothing else is read or written."""

import numpy as np
import pytest

from holdfast.worker.executors.cpu.block_bytes import BlockBytes
from holdfast.worker.executors.cpu.library import load_library
from holdfast.worker.executors.row_places import RowPlaces

SIZES = (48, 0, 17, 300)
NUM_BLOCKS = 9


def layers_of(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (NUM_BLOCKS, size), np.uint8) for size in SIZES]


def block(layers: list[np.ndarray], number: int) -> bytes:
    return b"".join(layer[number].tobytes() for layer in layers)


def test_rows_hold_all_bytes_of_a_block_wherever_they_are_copied_to():
    layers, elsewhere = layers_of(0), np.zeros((3, 400), np.uint8)
    pool, end = BlockBytes(layers, load_library()), 12 + sum(SIZES)
    expected = [block(layers, number) for number in (3, 7, 0)]
    assert [row.tobytes() for row in pool.read([3, 7, 0])] == expected
    firsts = [400 * number + 12 for number in range(3)]
    pool.read_into([3, 7, 0], RowPlaces(elsewhere.ravel(), firsts, sum(SIZES)))
    assert [row.tobytes() for row in elsewhere[:, 12:end]] == expected
    assert not elsewhere[:, :12].any()
    assert not elsewhere[:, end:].any()


def test_rows_go_where_they_are_written():
    layers, others = layers_of(0), layers_of(1)
    before = [block(layers, number) for number in range(NUM_BLOCKS)]
    rows = list(BlockBytes(others, load_library()).read([3, 7, 0]))
    written: list[int] = []
    BlockBytes(layers, load_library(), written.append).write([5, 8, 1], [rows[0], rows[2], rows[1]])
    assert written == [8], "the last one"
    for number in range(NUM_BLOCKS):
        of = {5: 3, 1: 7, 8: 0}.get(number)
        assert block(layers, number) == (before[number] if of is None else block(others, of))


@pytest.mark.parametrize("ids", [[NUM_BLOCKS], [-1]])
def test_a_block_of_another_pool_is_refused(ids):
    with pytest.raises(AssertionError):
        BlockBytes(layers_of(0), load_library()).read(ids)


def test_a_row_of_another_size_is_refused():
    with pytest.raises(AssertionError):
        BlockBytes(layers_of(0), load_library()).write([1], [np.zeros(sum(SIZES) - 1, np.uint8)])

"""Digests that are taken while rows are copied: those of the package xxhash, for any length, seed and cut."""

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from holdfast.worker.cache.sealing import Sealer
from holdfast.worker.executors.cpu import checked_rows
from holdfast.worker.executors.cpu.block_bytes import BlockBytes
from holdfast.worker.executors.cpu.checked_rows import LEAST_BYTES, copy_checked
from holdfast.worker.executors.cpu.library import load_library, runnable_classes
from holdfast.worker.executors.row_places import ROW_DIGEST_BYTES, RowPlaces

LENGTHS = (*range(1, 700), *range(1023, 1028), *range(2047, 2115), 4096, 65_536, 65_537, 368_640, 1_000_001)
"""Around stripes of 64 bytes and blocks of 1,024, as XXH3 takes them."""
SEEDS = (0, 1, 2**64 - 1, 0x9E3779B185EBCA87)
NUM_BLOCKS = 3
LINE = 64


@pytest.fixture(params=runnable_classes())
def library(request, monkeypatch):
    found = load_library(request.param)
    monkeypatch.setattr(checked_rows, "load_library", lambda: found)
    return found


def layers_of(length: int, random: np.random.Generator) -> list[np.ndarray]:
    """A pool whose rows have this length, cut into layers anywhere; sometimes at lines."""
    step = LINE if length > LINE and random.random() < 0.3 else 1
    cuts = sorted(random.integers(0, length // step + 1, random.integers(0, 6)) * step)
    sizes = np.diff([0, *cuts, length])
    return [random.integers(0, 256, (NUM_BLOCKS, size), np.uint8) for size in sizes]


def lines(num_bytes: int) -> np.ndarray:
    memory = np.zeros(num_bytes + LINE, np.uint8)
    return memory[-memory.ctypes.data % LINE :][:num_bytes]


@pytest.mark.parametrize("past_caches", [False, True])
def test_rows_have_the_digests_of_xxh3_for_any_length_seed_and_cut(library, past_caches):
    random = np.random.default_rng(1)
    for number, length in enumerate(LENGTHS):
        layers, seeds = layers_of(length, random), [SEEDS[number % 4], int(random.integers(1 << 63))]
        stride = -(-(length + ROW_DIGEST_BYTES) // LINE) * LINE
        first = 0 if past_caches else int(random.integers(LINE))
        memory = lines(first + 2 * stride + LINE)
        places = RowPlaces(memory, [first, first + stride], length, seeds, past_caches)
        BlockBytes(layers, library).read_into([2, 0], places)
        expected = np.zeros_like(memory)
        for at, block, seed in zip(places.firsts, (2, 0), seeds, strict=True):
            row = b"".join(layer[block].tobytes() for layer in layers)
            expected[at : at + length + ROW_DIGEST_BYTES] = np.frombuffer(row + xxh3_128_digest(row, seed), np.uint8)
        assert np.array_equal(memory, expected), f"{length} bytes, seeds {seeds}"


def sealed_rows(lengths: list[int], random: np.random.Generator) -> tuple[np.ndarray, list[int], list[int]]:
    """Rows with their digests in a memory, where they begin, and their seeds."""
    firsts = [int(first) for first in np.cumsum([0, *(length + 40 for length in lengths[:-1])])]
    memory = random.integers(0, 256, firsts[-1] + lengths[-1] + 40, np.uint8)
    seeds = [SEEDS[number % 4] for number in range(len(lengths))]
    for first, length, seed in zip(firsts, lengths, seeds, strict=True):
        digest = xxh3_128_digest(memory[first : first + length].tobytes(), seed)
        memory[first + length : first + length + ROW_DIGEST_BYTES] = np.frombuffer(digest, np.uint8)
    return memory, firsts, seeds


@pytest.mark.parametrize("lengths", [[241, 5000, 1024], [300], [65_536, 65_537], [64, 5000], [1, 240]])
def test_rows_are_copied_and_any_bit_that_differs_from_their_xxh3_is_found(lengths, library):
    random = np.random.default_rng(2)
    memory, firsts, seeds = sealed_rows(lengths, random)
    into = np.zeros_like(memory)
    assert copy_checked(memory, into, firsts, lengths, seeds)
    for first, length in zip(firsts, lengths, strict=True):
        assert np.array_equal(into[first : first + length], memory[first : first + length])
        for at in {0, length // 2, length - 1, length, length + ROW_DIGEST_BYTES - 1}:
            changed = memory.copy()
            changed[first + at] ^= 1 << int(random.integers(8))
            assert not copy_checked(changed, into, firsts, lengths, seeds), f"byte {at} of {length}"
    assert not copy_checked(memory, into, firsts, lengths, [seeds[0] ^ 1, *seeds[1:]]), "another name"


def test_rows_outside_of_either_memory_are_refused():
    memory, firsts, seeds = sealed_rows([300, 300], np.random.default_rng(3))
    for wrong in ([0, len(memory) - 300], [-1, 340]):
        with pytest.raises(AssertionError, match="places in both"):
            copy_checked(memory, np.zeros_like(memory), wrong, [300, 300], seeds)
    with pytest.raises(AssertionError, match="places in both"):
        copy_checked(memory, np.zeros(600, np.uint8), firsts, [300, 300], seeds)
    pool = BlockBytes([np.zeros((2, 300), np.uint8)], load_library())
    with pytest.raises(AssertionError, match="in the memory"):
        pool.read_into([0], RowPlaces(np.zeros(315, np.uint8), [0], 300, [1]))


def test_what_a_copy_seals_is_what_the_sealer_seals():
    names = [b"k" + bytes([number]) * 16 for number in range(NUM_BLOCKS)]
    rows = np.random.default_rng(4).integers(0, 256, (NUM_BLOCKS, 2 * LEAST_BYTES), np.uint8)
    length = rows.shape[1]
    memory = np.zeros((NUM_BLOCKS, length + ROW_DIGEST_BYTES), np.uint8)
    firsts = [number * memory.shape[1] for number in range(NUM_BLOCKS)]
    places = RowPlaces(memory.ravel(), firsts, length, Sealer.seeds(names))
    BlockBytes([rows], load_library()).read_into(range(NUM_BLOCKS), places)
    for name, row, record in zip(names, rows, memory, strict=True):
        assert record.tobytes() == b"".join(Sealer().seal(name, row.data))
        assert Sealer().unseal(name, record.data) == row.tobytes()

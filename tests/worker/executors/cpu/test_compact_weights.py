"""Compact weights: bfloat16 in 12 bits, without loss; and what is computed with them to the bit."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.worker.executors.cpu import tile_memory
from holdfast.worker.executors.cpu.tile_memory import Arena, Compactor, CompactTiles, PlainTiles, TileShape
from tests.examples import examples
from tests.worker.executors.cpu.native import ALL, BF16, Product, bits, library_or_skip, same_bits
from tests.worker.executors.cpu.runs import Runner, layout_of, tokens
from tests.worker.executors.cpu.test_products import linear

K_TILES, TILE_WORDS, RARE_PER_TILE = 3, 512, 2
PANEL_WORDS = K_TILES * 2 * TILE_WORDS


@pytest.fixture(scope="module")
def compactor():
    library = library_or_skip("avx2")
    pool = library.native_pool_create(2, -1, None)
    yield Compactor(library, pool, 1 << 20)
    library.native_pool_destroy(pool)


def words_of(exponents: np.ndarray, seed: int) -> np.ndarray:
    """bfloat16 numbers as words, with these exponents."""
    random = np.random.default_rng(seed)
    rest = random.integers(0, 256, exponents.shape)
    return ((rest >> 7) << 15 | exponents << 7 | (rest & 0x7F)).astype(np.uint16)


def there_and_back(compactor: Compactor, words: np.ndarray) -> np.ndarray | None:
    """None where the words do not fit."""
    panels = len(words) // PANEL_WORDS
    compact = np.zeros(panels * compactor.panel_bytes(K_TILES), dtype=np.uint8)
    if not compactor.compact(words.ctypes.data, panels * 32, K_TILES, compact.ctypes.data):
        return None
    out = np.zeros_like(words)
    compactor.expand(compact.ctypes.data, panels * 32, K_TILES, out.ctypes.data)
    return out


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    common=st.lists(st.integers(0, 127), min_size=1, max_size=8, unique=True),
    num_rare=st.integers(0, K_TILES * 2 * RARE_PER_TILE),
    panels=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_any_numbers_of_sixteen_exponents_and_a_few_others_come_back(compactor, common, num_rare, panels, seed):
    """The sixteen are eight pairs that differ in the last bit. Zeros, subnormals, infinities and NaN are as others."""
    random = np.random.default_rng(seed)
    exponents = random.choice(common, (panels, PANEL_WORDS)) * 2 + random.integers(0, 2, (panels, PANEL_WORDS))
    for panel in exponents:
        panel[random.choice(PANEL_WORDS, num_rare, replace=False)] = random.integers(0, 256, num_rare)
    words = words_of(exponents, seed).reshape(-1)
    assert (there_and_back(compactor, words) == words).all()


def test_more_rare_numbers_than_there_is_room_for_do_not_fit(compactor):
    exponents = np.full((2, PANEL_WORDS), 120)
    exponents[:, :8] = np.arange(100, 116, 2)  # two each: with 120 they are nine pairs
    exponents[:, 8:16] = np.arange(101, 117, 2)
    room = K_TILES * 2 * RARE_PER_TILE
    exponents[1, 100 : 100 + room - 2] = np.arange(30, 30 + 2 * (room - 2), 2)
    assert there_and_back(compactor, words_of(exponents, 0).reshape(-1)) is not None  # two of the ninth
    exponents[1, 100 + room - 2] = 28
    assert there_and_back(compactor, words_of(exponents, 0).reshape(-1)) is None


def test_normal_weights_take_three_quarters(compactor):
    words = torch.empty(64 * PANEL_WORDS).normal_(0, 0.02).to(BF16)
    assert (there_and_back(compactor, bits(words).view(np.uint16)) == bits(words).view(np.uint16)).all()
    assert compactor.panel_bytes(28) < 0.77 * 28 * 2 * TILE_WORDS * 2


SHAPES = st.tuples(
    st.one_of(st.integers(1, 40), st.sampled_from([64, 255, 257])),  # rows
    st.integers(1, 400),  # inputs of a slice
    st.integers(1, 150),  # outputs
    st.sampled_from([1, 2, 4]),  # slices
)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=examples(32), deadline=None, derandomize=True)
@given(shape=SHAPES, std=st.sampled_from([0.02, 1.0]), num_rare=st.integers(0, 6), seed=st.integers(0, 99))
def test_products_have_the_bits_of_those_with_whole_weights(name, shape, std, num_rare, seed):
    rows, length, outputs, slices = shape
    x, weight = linear(BF16, rows, length * slices, outputs, seed)
    weight *= std
    chosen = torch.randint(weight.numel(), (num_rare,), generator=torch.Generator().manual_seed(seed))
    weight.view(-1)[chosen] = torch.tensor([1e-30, 1e30, -0.0, 1e-12, -3e5, 7e-20], dtype=BF16)[:num_rare]
    library = library_or_skip(name)
    compact = Product(library, weight, slices, compacts=True)
    assert compact.native.panel_bytes > 0
    assert same_bits(Product(library, weight, slices)(x), compact(x))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_answers_the_same(name, tied):
    layout = layout_of("llama", BF16, (("tie_word_embeddings", tied),))
    whole, compact = (run(layout, name, compacts) for compacts in (False, True))
    assert same_bits(whole, compact)


def run(layout, name: str, compacts: bool) -> torch.Tensor:
    library_or_skip(name)
    runner = Runner(layout, name=name, compacts=compacts)
    logits = runner.run(tokens(60), chunks=(40, 1, 19))
    assert (runner.executor.packed.model.head.panel_bytes > 0) == compacts
    runner.close()
    return logits


def scattered(rows: int, inner: int) -> torch.Tensor:
    """A weight with all exponents there are."""
    random = np.random.default_rng(0)
    exponents = random.integers(0, 255, (rows, inner))
    return torch.from_numpy(words_of(exponents, 1).view(np.int16)).view(BF16)


@pytest.mark.parametrize("first_bad", [0, 64, 128])
def test_a_weight_that_does_not_fit_is_kept_whole(monkeypatch, first_bad):
    """Also one that does not fit from some piece on, when the pieces before are compact already."""
    monkeypatch.setattr("holdfast.worker.executors.cpu.packing.PIECE_BYTES", 64 * 96 * 2)  # a group a piece
    x, weight = linear(BF16, 5, 96, 192)
    weight[first_bad : first_bad + 40] = scattered(40, 96)
    library = library_or_skip()
    compact = Product(library, weight, compacts=True)
    assert compact.native.panel_bytes == 0
    assert np.array_equal(bits(Product(library, weight)(x)), bits(compact(x)))


class SeenArena(Arena):
    """An arena that says what was taken, and gives the same memory to who takes it again, as a shared one does."""

    def __init__(self, taken: list[tuple[int, int]] | None = None) -> None:
        super().__init__()
        self.taken: list[tuple[int, int]] = []
        self._known = taken
        self.is_packed = taken is not None

    def take(self, num_bytes: int) -> int:
        if self._known is None:
            self.taken.append((num_bytes, super().take(num_bytes)))
        else:
            self.taken.append(self._known[len(self.taken)])
            assert self.taken[-1][0] == num_bytes
        return self.taken[-1][1]


@pytest.mark.parametrize("fits", [True, False])
def test_who_finds_the_memory_packed_knows_how_the_weight_is_kept(compactor, fits):
    shape = TileShape(64, K_TILES * 32 * 2, K_TILES)
    exponents = np.random.default_rng(0).integers(100, 110 if fits else 200, 64 * 96)
    words = words_of(exponents, 0)
    first = SeenArena()
    one = CompactTiles(first, shape, compactor)
    ctypes.memmove(one.room(0), words.ctypes.data, words.nbytes)
    one.written(0, 64)
    two = CompactTiles(SeenArena(first.taken), shape, compactor)
    assert (two.address, two.panel_bytes) == (one.address, one.panel_bytes)
    assert (one.panel_bytes > 0) == fits


def test_memory_that_is_not_compact_has_no_room_of_its_own():
    tiles = PlainTiles(Arena(), TileShape(64, 192, 3))
    assert tiles.room(32) == tiles.address + 32 * 192
    assert tiles.panel_bytes == 0


def test_the_classes_that_keep_weights_compact_are_classes():
    assert set(ALL) >= tile_memory.COMPACT_CLASSES

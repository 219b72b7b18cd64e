"""Compact weights: bfloat16 in 12 bits, without loss; and what is computed with them to the bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.worker.executors.cpu import library
from holdfast.worker.executors.cpu.tile_memory import (
    MISFIT,
    NOT_FINITE,
    Arena,
    Compactor,
    CompactTiles,
    PlainTiles,
    TileShape,
)
from holdfast.worker.executors.cpu.weight_codes import DTYPES
from holdfast.worker.executors.finite import NotFiniteError
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
    yield Compactor(library, pool)
    library.native_pool_destroy(pool)


def words_of(exponents: np.ndarray, seed: int) -> np.ndarray:
    """bfloat16 numbers as words, with these exponents."""
    random = np.random.default_rng(seed)
    rest = random.integers(0, 256, exponents.shape)
    return ((rest >> 7) << 15 | exponents << 7 | (rest & 0x7F)).astype(np.uint16)


def pack(compactor: Compactor, rows: np.ndarray, out: int, panel_bytes: int) -> int:
    """Packs words [panels x 32, inputs]; the outcome, finite or not."""
    addresses = (rows.ctypes.data + np.arange(len(rows)) * rows.strides[0]).astype(np.uint64)
    shape = len(rows), 1, rows.shape[1], rows.shape[1] // 32
    library, pool = compactor._library, compactor._pool
    return library.native_pack(pool, addresses.ctypes.data, *shape, DTYPES[BF16], panel_bytes, out) & ~NOT_FINITE


def packed(compactor: Compactor, words: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Tiles of words, as they are, and compact panels; None where they do not fit."""
    rows = words.reshape(-1, K_TILES * 32)
    tiles = np.zeros(len(words), dtype=np.uint16)
    compact = np.zeros(len(rows) // 32 * compactor.panel_bytes(K_TILES), dtype=np.uint8)
    assert pack(compactor, rows, tiles.ctypes.data, 0) == 0
    outcome = pack(compactor, rows, compact.ctypes.data, compactor.panel_bytes(K_TILES))
    assert outcome in (0, MISFIT)
    return tiles, None if outcome else compact


def come_back(compactor: Compactor, words: np.ndarray) -> bool | None:
    """Whether compact panels are the tiles again; None where the words do not fit."""
    tiles, compact = packed(compactor, words)
    if compact is None:
        return None
    out = np.zeros_like(tiles)
    compactor.expand(compact.ctypes.data, len(words) // PANEL_WORDS * 32, K_TILES, out.ctypes.data)
    return bool((out == tiles).all())


@settings(max_examples=examples(40), deadline=None, derandomize=True)
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
    assert come_back(compactor, words)


def test_more_rare_numbers_than_there_is_room_for_do_not_fit(compactor):
    exponents = np.full((2, PANEL_WORDS), 120)
    exponents[:, :8] = np.arange(100, 116, 2)  # two each: with 120 they are nine pairs
    exponents[:, 8:16] = np.arange(101, 117, 2)
    room = K_TILES * 2 * RARE_PER_TILE
    exponents[1, 100 : 100 + room - 2] = np.arange(30, 30 + 2 * (room - 2), 2)
    assert come_back(compactor, words_of(exponents, 0).reshape(-1))  # two of the ninth
    exponents[1, 100 + room - 2] = 28
    assert come_back(compactor, words_of(exponents, 0).reshape(-1)) is None


def panel_by_the_format(tiles: np.ndarray) -> bytes:
    """A panel of `native/compact_order.h`, written once more: words [tiles, 512] of weights that fit."""
    high, low = tiles >> 8, (tiles & 0xFF).astype(np.uint8)
    exponents = high & 0x7F
    counts = np.bincount(exponents.reshape(-1), minlength=128)
    chosen = np.argsort(-counts, kind="stable")[:8]
    place = np.full(128, 255)
    place[chosen] = np.arange(8)
    is_rare = place[exponents] == 255
    of_word = (place[exponents] & 7) | (high >> 7) << 3
    starts = np.concatenate([[0], np.cumsum(is_rare.sum(1))]).astype(np.uint16)
    at, rare = np.nonzero(is_rare)
    listed = np.stack([rare, high[at, rare]], axis=1).astype(np.uint16).tobytes()
    words = [p % 16 // 8 * 32 + p // 16 * 8 + p % 8 for p in range(64)]  # whose bytes lie at p

    def halves(numbers: np.ndarray) -> np.ndarray:
        return numbers.reshape(len(tiles), 4, 2, 64)[..., words]

    both = halves(of_word)[:, :, 0] | halves(of_word)[:, :, 1] << 4
    blocks = np.concatenate([both[:, :, None].astype(np.uint8), halves(low)], axis=2)
    head = np.concatenate([chosen, chosen | 0x80]).astype(np.uint8).tobytes() + starts.tobytes()
    head = head.ljust(-(-len(head) // 4) * 4, b"\0") + listed
    rare_end = -(-(16 + 2 * len(starts)) // 4) * 4 + len(tiles) * RARE_PER_TILE * 4
    return head.ljust(-(-rare_end // 64) * 64, b"\0") + blocks.tobytes()


@pytest.mark.parametrize("num_rare", [0, 5])
def test_panels_are_those_of_the_format(compactor, num_rare):
    words = bits(torch.empty(2 * PANEL_WORDS).normal_(0, 0.02, generator=torch.Generator().manual_seed(1)).to(BF16))
    words = words.view(np.uint16).copy()
    words[100 : 100 + num_rare * 7 : 7] = 0xC001
    tiles, compact = packed(compactor, words)
    assert compact is not None
    by_hand = [panel_by_the_format(panel) for panel in tiles.reshape(2, K_TILES * 2, TILE_WORDS)]
    assert compact.tobytes() == b"".join(by_hand)


def test_a_tile_has_its_numbers_where_products_read_them(compactor):
    """Of every type, slices that end within a tile included; and outputs without a row."""
    for dtype in DTYPES:
        rows = torch.randn(64, 3 * 41, generator=torch.Generator().manual_seed(2)).to(dtype)
        addresses = (rows.data_ptr() + np.arange(64) * rows[0].nbytes).astype(np.uint64)
        addresses[5] = 0
        rows[5] = 0
        tiles, places = torch.full((2, 6, 2, 512), torch.nan).to(dtype), np.zeros((32, 16), dtype=np.int16)
        library, shape = compactor._library, (64, 3, 41, 2)
        outcome = library.native_pack(
            compactor._pool, addresses.ctypes.data, *shape, DTYPES[dtype], 0, tiles.data_ptr()
        )
        library.native_places(DTYPES[dtype], places.ctypes.data)
        found = tiles[..., torch.from_numpy(places.astype(np.int64))]  # [panel, tile, half, input, output]
        found = found.permute(0, 2, 4, 1, 3).reshape(64, 3, 64)
        assert outcome == 0
        assert same_bits(found[..., :41].contiguous(), rows.view(64, 3, 41))
        assert not found[..., 41:].float().any()


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_is_found(dtype, odd):
    weight = torch.full((40, 70), torch.finfo(dtype).max, dtype=dtype)
    for compacts in {False, dtype == BF16}:
        Product(library_or_skip("avx2"), weight, compacts=compacts)
    weight[39, 69] = odd
    for compacts in {False, dtype == BF16}:
        with pytest.raises(NotFiniteError, match=r"shape \[40, 70\]"):
            Product(library_or_skip("avx2"), weight, compacts=compacts)


def test_normal_weights_take_three_quarters(compactor):
    words = torch.empty(64 * PANEL_WORDS).normal_(0, 0.02).to(BF16)
    assert come_back(compactor, bits(words).view(np.uint16))
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
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 33])
def test_rare_numbers_are_multiplied_too(name, rows):
    """Of a weight with as many common high bytes as there are places, so that others are rare."""
    exponents = np.random.default_rng(rows).integers(112, 128, (64, 320))
    exponents[::16, rows::31] = 40
    weight = torch.from_numpy(words_of(exponents, rows).view(np.int16)).view(BF16)
    x = linear(BF16, rows, 320, 1)[0]
    library = library_or_skip(name)
    compact = Product(library, weight, 2, compacts=True)
    assert compact.native.panel_bytes > 0
    assert same_bits(Product(library, weight, 2)(x), compact(x))


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
    monkeypatch.setattr("holdfast.worker.executors.cpu.part_packing.PIECE_BYTES", 64 * 96 * 2)  # a group a piece
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
    rows = words_of(exponents, 0).reshape(64, 96)
    first = SeenArena()
    one = CompactTiles(first, shape, compactor)
    assert one.write(0, lambda out, panel_bytes: pack(compactor, rows, out, panel_bytes)) == 0
    two = CompactTiles(SeenArena(first.taken), shape, compactor)
    assert (two.address, two.panel_bytes) == (one.address, one.panel_bytes)
    assert (one.panel_bytes > 0) == fits


def test_memory_that_is_not_compact_has_no_room_of_its_own():
    tiles = PlainTiles(Arena(), TileShape(64, 192, 3))
    assert tiles.write(32, lambda out, panel_bytes: out + panel_bytes) == tiles.address + 32 * 192
    assert tiles.panel_bytes == 0


def test_the_classes_that_keep_weights_compact_are_classes():
    assert set(ALL) >= library.CODED_CLASSES >= library.COMPACT_CLASSES

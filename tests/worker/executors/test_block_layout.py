"""Rows that are regrouped have every byte where a row of that layout has it, by a rule that places bytes one by one."""

from itertools import pairwise, product

import numpy as np
import pytest

from holdfast.worker.executors.block_layout import (
    BlockLayout,
    Heads,
    PageForm,
    Regrouping,
    heads_from,
    mismatch,
)

PLAIN = PageForm(keys=64, values=48, value_tiles=3)
CODES = PageForm(keys=32, values=32, value_tiles=2, scale=2)
LATENT = PageForm(keys=96, values=0, value_tiles=0, scale=2)
NUM_TOKENS = 384


def rank(heads: Heads, block_size: int, pages: tuple[PageForm, ...] = (PLAIN, CODES)) -> BlockLayout:
    return BlockLayout(numbers="any", pages=pages, block_size=block_size, heads=heads)


def shares(*heads: tuple[int, ...], num_layers: int = 2) -> list[Heads]:
    return [(one,) * num_layers for one in heads]


def byte_of(*place: int) -> int:
    """What lies at a place of the whole model's cache: any function of it."""
    number = 7
    for one in place:
        number = (number * 31 + one + 1) % 65_521
    return number % 251


def row_of(layout: BlockLayout, block: int) -> np.ndarray:
    """By the layout of `native/pages.h`, a byte at a time."""
    size, row = layout.block_size, []
    for layer, (heads, page) in enumerate(zip(layout.heads, layout.pages, strict=True)):
        for head in heads:
            first = block * size
            for unit in range(size // 16):
                row += [byte_of(layer, head, 0, first // 16 + unit, at) for at in range(page.keys)]
            halves = 1 if size % 32 else 2
            each = page.values // max(1, page.value_tiles)
            for span, tile, half in product(range(size // 16 // halves), range(page.value_tiles), range(halves)):
                unit = first // 16 + span * halves + half
                row += [byte_of(layer, head, 1, unit, tile * each + at) for at in range(each)]
            for kind, token in product(range(2), range(size)):
                row += [byte_of(layer, head, 2 + kind, first + token, at) for at in range(page.scale)]
    return np.array(row, np.uint8)


def regrouped(ours: BlockLayout, parts: list[BlockLayout], first: int, batches: list[int]) -> list[np.ndarray]:
    """Rows behind the first `first` tokens, from senders that send so many blocks at a time, one after the other."""
    size = parts[0].block_size
    regrouping = Regrouping(ours, size, [part.heads for part in parts], first % size)
    rows = []
    for begin, end in pairwise(np.cumsum([first // size, *batches])):
        for number, part in enumerate(parts):
            rows += regrouping.take(number, [row_of(part, block) for block in range(begin, end)])
    return rows


@pytest.mark.parametrize(("theirs", "ours"), list(product((16, 32, 48, 64), repeat=2)))
@pytest.mark.parametrize("pages", [(PLAIN, CODES), (LATENT, PLAIN)])
def test_blocks_are_split_and_joined(theirs, ours, pages):
    whole = shares((0, 1))[0]
    first = ours
    num_blocks = NUM_TOKENS // theirs - first // theirs
    rows = regrouped(rank(whole, ours, pages), [rank(whole, theirs, pages)], first, [1, 0, num_blocks - 1])
    assert len(rows) == (NUM_TOKENS - first) // ours
    for block, row in enumerate(rows, first // ours):
        assert np.array_equal(row, row_of(rank(whole, ours, pages), block))


RANKS = {
    "one": shares((0, 1, 2, 3)),
    "two": shares((0, 1), (2, 3)),
    "four": shares((0,), (1,), (2,), (3,)),
    "unequal": shares((0, 1, 2), (3,)),
    "repeated": shares((0, 1), (0, 1), (2, 3), (2, 3)),
    "by layer": [((0, 1), (0, 1, 2)), ((2, 3), (3,))],
}


@pytest.mark.parametrize(("theirs", "ours"), list(product(RANKS, repeat=2)))
def test_heads_of_any_ranks_come_together(theirs, ours):
    """With other blocks at the same time. Every head of every layer comes once."""
    senders = RANKS[theirs]
    assert not mismatch(senders, RANKS[ours])
    for receiver, own in enumerate(RANKS[ours]):
        taken = [heads_from(sender, senders, receiver, RANKS[ours]) for sender in range(len(senders))]
        for layer, heads in enumerate(own):
            assert sorted(head for each in taken for head in each[layer]) == list(heads)
        parts = [rank(heads, 32) for heads in taken if any(heads)]
        rows = regrouped(rank(own, 16), parts, 16, [2])
        assert [row.tolist() for row in rows] == [row_of(rank(own, 16), block).tolist() for block in (1, 2, 3)]
        for sender, heads in enumerate(taken):
            if any(heads):
                whole = row_of(rank(senders[sender], 32), 0)
                assert np.array_equal(rank(senders[sender], 32).cut(whole, heads), row_of(rank(heads, 32), 0))


def test_equal_ranks_take_from_their_own_number():
    repeated = RANKS["repeated"]
    for sender, receiver in product(range(4), repeat=2):
        expected = repeated[receiver] if sender == receiver else ((), ())
        assert heads_from(sender, repeated, receiver, repeated) == expected


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        ([], "its ranks have other layers"),
        (shares((0, 1, 2, 3), num_layers=3), "its ranks have other layers"),
        (shares((0, 1), (2,)), "its ranks have other KV heads"),
        (shares((0, 1, 2, 3, 4)), "its ranks have other KV heads"),
    ],
)
def test_other_models_are_told_apart(theirs, reason):
    assert mismatch(theirs, RANKS["two"]) == reason


def test_a_row_of_another_size_is_refused():
    regrouping = Regrouping(rank(RANKS["one"][0], 16), 32, [RANKS["one"][0]], 0)
    with pytest.raises(ValueError, match="a block of 5 bytes"):
        regrouping.take(0, [np.zeros(5, np.uint8)])
    with pytest.raises(ValueError, match="a block of 5 bytes"):
        rank(RANKS["one"][0], 16).cut(np.zeros(5, np.uint8), RANKS["one"][0])

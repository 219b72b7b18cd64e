"""Block layout: how keys and values of a model are cut into rows of bytes, over ranks and over tokens, and the way from
one cut to another.

A rank's row of a block has a page for each of its KV heads, layer by layer. A page has tiles of keys, tiles of values,
and their scales:

    keys [block / 16][bytes]  |  values [block / span][tiles][span / 16][bytes]  |  scales [2][block][bytes]

`span` is 32 tokens, or 16 where a block is no multiple of 32. So 16 tokens of one head have the same bytes in pages of
any size: a unit. Replicas of one model whose layouts have the same `numbers` differ in the units of a row alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

UNIT: Final = 16
"""Tokens."""
_WIDE: Final = 32
"""Tokens of a wide tile of values."""

Bytes = NDArray[np.uint8]

Heads = tuple[tuple[int, ...], ...]
"""KV heads in each layer, as the whole model numbers them, ascending."""


class PageForm(NamedTuple):
    """Bytes of one KV head in one layer: those of 16 tokens."""

    keys: int
    values: int
    value_tiles: int
    """Tiles of values side by side; 0: there are none."""
    scale: int = 0
    """Bytes of one token's scale, of its key or of its value."""

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        return self.keys + self.values + 2 * UNIT * self.scale

    def units_of(self, pages: Bytes, block_size: int) -> Bytes:
        """pages [N, heads, bytes] of this number of tokens -> units [N * block_size / 16, heads, unit_bytes]. Neither N
        nor heads are 0.
        """
        count, heads, per = *pages.shape[:2], block_size // UNIT
        keys, values, scales = np.split(pages, [per * self.keys, per * (self.keys + self.values)], axis=2)
        parts = [
            keys.reshape(count, heads, per, self.keys),
            _turned(values, (per // 2, self.value_tiles, 2), block_size).reshape(count, heads, per, self.values),
            scales.reshape(count, heads, 2, per, -1).swapaxes(2, 3).reshape(count, heads, per, -1),
        ]
        return np.concatenate(parts, axis=3).swapaxes(1, 2).reshape(count * per, heads, self.unit_bytes)

    def pages_of(self, units: Bytes, block_size: int) -> Bytes:
        """The reverse of `units_of`."""
        per = block_size // UNIT
        count, heads = len(units) // per, units.shape[1]
        by_head = units.reshape(count, per, heads, self.unit_bytes).swapaxes(1, 2)
        keys, values, scales = np.split(by_head, [self.keys, self.keys + self.values], axis=3)
        parts = [
            keys.reshape(count, heads, -1),
            _turned(values, (per // 2, 2, self.value_tiles), block_size),
            scales.reshape(count, heads, per, 2, -1).swapaxes(2, 3).reshape(count, heads, -1),
        ]
        return np.concatenate(parts, axis=2)


def _turned(values: Bytes, shape: tuple[int, int, int], block_size: int) -> Bytes:
    """Values with two axes of `shape` exchanged, the tiles and the halves of a wide tile: [N, heads, bytes]. Narrow
    tiles lie as units do.
    """
    count, heads = values.shape[:2]
    if block_size % _WIDE or not values.size:
        return values.reshape(count, heads, -1)
    return values.reshape(count, heads, *shape, -1).swapaxes(3, 4).reshape(count, heads, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """One rank's rows."""

    numbers: str
    """Names the format of numbers and their order in tiles."""
    pages: tuple[PageForm, ...]
    """Pages of each layer."""
    block_size: int
    """Tokens of a block: a multiple of 16."""
    heads: Heads
    """This rank's."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        units = self.block_size // UNIT
        return units * sum(len(heads) * page.unit_bytes for heads, page in zip(self.heads, self.pages, strict=True))

    def layers_of(self, rows: Bytes) -> list[Bytes]:
        """rows [N, row_bytes] -> each layer's pages [N, heads, bytes of a page]

        Raises ValueError for rows of another size.
        """
        if rows.shape[1] != self.row_bytes:
            raise ValueError(f"a block of {rows.shape[1]} bytes, where {self.row_bytes} belong to these heads")
        layers, at = [], 0
        for heads, page in zip(self.heads, self.pages, strict=True):
            end = at + len(heads) * self.block_size // UNIT * page.unit_bytes
            layers.append(rows[:, at:end].reshape(len(rows), len(heads), self.block_size // UNIT * page.unit_bytes))
            at = end
        return layers

    def cut(self, row: Bytes, heads: Heads) -> Bytes:
        """The part of a row [row_bytes] that these of its heads have."""
        layers = zip(self.layers_of(row[None]), self.heads, heads, strict=True)
        return np.concatenate([pages[0, np.searchsorted(own, some)].ravel() for pages, own, some in layers])


# --- who sends what to whom ---


def mismatch(theirs: Sequence[Heads], ours: Sequence[Heads]) -> str:
    """Why ranks with these heads cannot take blocks from each other, in words; empty: they can."""
    if not (theirs and ours) or len({len(heads) for heads in (*theirs, *ours)}) != 1:
        return "its ranks have other layers"
    layers = zip(zip(*theirs, strict=True), zip(*ours, strict=True), strict=True)
    if any(set().union(*one) != set().union(*other) for one, other in layers):
        return "its ranks have other KV heads"
    return ""


def heads_from(sender: int, theirs: Sequence[Heads], receiver: int, ours: Sequence[Heads]) -> Heads:
    """The heads that rank `receiver` of one replica takes from rank `sender` of another: of each head from the rank of
    its number, if that one has it, else from the first that has it.
    """
    by_layer = zip(zip(*theirs, strict=True), ours[receiver], strict=True)
    return tuple(_of_layer(sender, of_ranks, receiver, own) for of_ranks, own in by_layer)


@lru_cache(maxsize=256)  # most layers are the same
def _of_layer(
    sender: int, of_ranks: tuple[tuple[int, ...], ...], receiver: int, own: tuple[int, ...]
) -> tuple[int, ...]:
    def comes_from(head: int) -> int:
        holders = [rank for rank, heads in enumerate(of_ranks) if head in heads]
        return receiver if receiver in holders else holders[0]

    return tuple(head for head in own if comes_from(head) == sender)


class Regrouping:
    """Puts one rank's rows together from blocks that are cut otherwise, which come in order from several ranks."""

    def __init__(self, own: BlockLayout, block_size: int, parts: Sequence[Heads], num_skipped: int) -> None:
        """`block_size`: tokens of the blocks that come; `parts`: each sender's heads in them. The first `num_skipped`
        tokens of the first block are left out.
        """
        self._own = own
        self._parts = [
            BlockLayout(numbers=own.numbers, pages=own.pages, block_size=block_size, heads=heads) for heads in parts
        ]
        self._come: list[list[Bytes]] = [[] for _ in parts]
        self._units: list[Bytes] = [
            np.empty((0, len(heads), page.unit_bytes), np.uint8)
            for heads, page in zip(own.heads, own.pages, strict=True)
        ]
        self._num_skipped = num_skipped // UNIT

    def take(self, part: int, rows: Sequence[Bytes]) -> list[Bytes]:
        """Takes the next rows of a sender; returns the rank's rows that are complete now, in order. Raises ValueError
        for rows of another size.
        """
        self._come[part] += rows
        count = min(map(len, self._come))
        if not count:
            return []
        whole = self._joined([np.stack(rows[:count]) for rows in self._come])
        self._come = [rows[count:] for rows in self._come]
        units = [np.concatenate(pair) for pair in zip(self._units, whole, strict=True)]
        skipped = min(self._num_skipped, len(units[0]))
        self._num_skipped -= skipped
        end = skipped + (len(units[0]) - skipped) * UNIT // self._own.block_size * self._own.block_size // UNIT
        self._units = [layer[end:] for layer in units]
        if end == skipped:
            return []
        return self._rows([layer[skipped:end] for layer in units])

    def _joined(self, rows: Sequence[Bytes]) -> list[Bytes]:
        """Units of all heads of each layer, of all senders' rows."""
        apart = [part.layers_of(some) for part, some in zip(self._parts, rows, strict=True)]
        layers = []
        for index, (page, own) in enumerate(zip(self._own.pages, self._own.heads, strict=True)):
            num_units = len(rows[0]) * self._parts[0].block_size // UNIT
            units = np.empty((num_units, len(own), page.unit_bytes), np.uint8)
            for part, pages in zip(self._parts, apart, strict=True):
                if heads := part.heads[index]:
                    units[:, np.searchsorted(own, heads)] = page.units_of(pages[index], part.block_size)
            layers.append(units)
        return layers

    def _rows(self, units: Sequence[Bytes]) -> list[Bytes]:
        size = self._own.block_size
        pages = [page.pages_of(layer, size) for page, layer in zip(self._own.pages, units, strict=True)]
        return list(np.concatenate([layer.reshape(len(layer), -1) for layer in pages], axis=1))

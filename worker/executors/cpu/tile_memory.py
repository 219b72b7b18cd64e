"""Tile memory: where a packed linear's tiles lie, as they are or compact.

Compact weights take 12 bits a number and lose nothing (`native/compact_order.h`): a step that waits for memory waits
for three quarters of it.
"""

import ctypes
import logging
import mmap
from collections.abc import Callable, Iterator
from ctypes import CDLL
from dataclasses import fields, is_dataclass
from typing import Final, NamedTuple, Protocol

from torch import Tensor

from holdfast.worker.executors.cpu.library import check_outcome
from holdfast.worker.executors.layout import DecoderLayout
from holdfast.worker.executors.linears import Linear
from holdfast.worker.executors.mapped_files import MappedFiles, discard_contents, span

CHUNK_BYTES: Final = 64 << 20
CACHE_LINE: Final = 64  # bytes


class Arena:
    """Memory of this process alone. Small weights by themselves would get small pages."""

    is_packed = False
    """Whether the mapped memory already holds its weights."""

    def __init__(self) -> None:
        self._chunks: list[mmap.mmap] = []
        self._next = 0
        self._end = 0

    def take(self, num_bytes: int) -> int:
        """Allocates this number of bytes at the beginning of a cache line, and returns the address. They live as long
        as the arena.
        """
        num_bytes = -(-num_bytes // CACHE_LINE) * CACHE_LINE
        if self._next + num_bytes > self._end:
            size = max(num_bytes, CHUNK_BYTES)
            self._next = self._chunk(size)
            self._end = self._next + size
        address, self._next = self._next, self._next + num_bytes
        return address

    def finish(self) -> None:
        """Seals the memory once all of it has been written."""

    def _chunk(self, num_bytes: int) -> int:
        self._chunks.append(mapped_memory(num_bytes))
        return -(-address_of(self._chunks[-1]) // CACHE_LINE) * CACHE_LINE


def mapped_memory(num_bytes: int) -> mmap.mmap:
    """Zeros of the system's, which take memory once they are written to; in large pages where it can."""
    memory = mmap.mmap(-1, max(num_bytes, 1) + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= 2 << 20:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


logger = logging.getLogger(__name__)

PANEL: Final = 32
"""Outputs of a panel: the least that is compact by itself."""

_TILE_OUTPUTS: Final = 16  # outputs of a tile
_PLACE_OF_MARK, _KEPT_AS_TILES = 16, 0xFFFF


class TileShape(NamedTuple):
    """Shape of a packed linear."""

    rows: int
    """Outputs, filled up to whole groups."""
    row_bytes: int
    """Bytes of an output's numbers, padded to whole tiles."""
    k_tiles: int
    """Tiles of an output."""


Pack = Callable[[int, int], int]
"""Packs rows to an address, as panels of this many bytes, or plainly where it is 0; outcome: the bits below."""

MISFIT: Final = 1
"""Bit of an outcome: the rows have too many exponents to be compact, and what was written is of no use
(`native/packing.cpp`)."""
NOT_FINITE: Final = 2
"""Bit of an outcome: a number is a NaN or an infinity."""


class TileMemory(Protocol):
    """Memory for the tiles of one linear."""

    address: int
    panel_bytes: int
    """Bytes of a compact panel; 0: the tiles are not compact."""

    def write(self, first: int, pack: Pack) -> int:
        """Has the tiles of rows `first` onwards packed where they stay, and returns the outcome."""


class PlainTiles:
    """Tiles as they are."""

    panel_bytes = 0

    def __init__(self, arena: Arena, shape: TileShape) -> None:
        self.address = arena.take(shape.rows * shape.row_bytes)
        self._row_bytes = shape.row_bytes

    def write(self, first: int, pack: Pack) -> int:
        return pack(self.address + first * self._row_bytes, self.panel_bytes)


class Compactor:
    """Sizes of compact panels, and their tiles as they were, on the threads of a pool."""

    def __init__(self, library: CDLL, pool: int) -> None:
        self._library, self._pool = library, pool

    def panel_bytes(self, k_tiles: int) -> int:
        return int(self._library.native_compact_bytes(k_tiles * PANEL // _TILE_OUTPUTS))

    def expand(self, panels: int, rows: int, k_tiles: int, out: int) -> None:
        """Writes the tiles of compact panels to `out`, as they were."""
        num_panels, tiles = rows // PANEL, k_tiles * PANEL // _TILE_OUTPUTS
        check_outcome(self._library.native_expand(self._pool, panels, num_panels, tiles, out), "a weight's tiles")


class CompactTiles:
    """Tiles packed compact piece by piece. A weight whose exponents are too many is kept as tiles after all."""

    def __init__(self, arena: Arena, shape: TileShape, compactor: Compactor) -> None:
        self._arena, self._shape, self._compactor = arena, shape, compactor
        self._tiles: PlainTiles | None = None
        self.panel_bytes = compactor.panel_bytes(shape.k_tiles)
        self.address = arena.take(shape.rows // PANEL * self.panel_bytes)
        if arena.is_packed and self._mark.value == _KEPT_AS_TILES:
            self._keep_tiles()

    def write(self, first: int, pack: Pack) -> int:
        if self._tiles is not None:
            return self._tiles.write(first, pack)
        outcome = pack(self.address + first // PANEL * self.panel_bytes, self.panel_bytes)
        if not outcome & MISFIT:
            return outcome
        logger.info("a weight of %d rows has too many exponents to be compact", self._shape.rows)
        panels, mark = self.address, self._mark
        tiles = self._keep_tiles()
        if first:
            self._compactor.expand(panels, first, self._shape.k_tiles, tiles.address)
        outcome = tiles.write(first, pack)
        mark.value = _KEPT_AS_TILES  # a process that finds this memory packed reads it
        return outcome

    def _keep_tiles(self) -> PlainTiles:
        self._tiles = PlainTiles(self._arena, self._shape)
        self.address, self.panel_bytes = self._tiles.address, 0
        return self._tiles

    @property
    def _mark(self) -> ctypes.c_uint16:
        """Position of the rare numbers of the first tile in the first panel, which is 0 where a weight is compact."""
        return ctypes.c_uint16.from_address(self.address + _PLACE_OF_MARK)


class FreedWeights:
    """The weights of a layout, each of which is read once."""

    def __init__(self, layout: DecoderLayout) -> None:
        self._files = MappedFiles()
        self._shared = _overlapping(layout)

    def give_back(self, part: Tensor) -> None:
        """Lets the system take its pages if they are a file's; they can be read again."""
        self._files.give_back(part)

    def read(self, weights: tuple[Tensor, ...], rows: slice) -> None:
        """These rows of each will not be read again.

        What lies in a file stays readable. Other memory is lost, unless another part of the layout lies there too.
        """
        for weight in weights:
            part = weight[rows]
            if not self._files.give_back(part) and weight.data_ptr() not in self._shared:
                discard_contents(part)


def linears(part: object) -> Iterator[Linear]:
    """All linears in a part of a layout."""
    if isinstance(part, Linear):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from linears(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from linears(getattr(part, field.name))


def is_tied(layout: DecoderLayout) -> bool:
    """Whether the head's weights are the embedding's table: then it is kept packed, and once."""
    table = layout.embedding
    if table.is_meta:
        return True
    if not layout.head.weights:
        return False
    (head,) = layout.head.weights
    return (head.data_ptr(), head.shape, head.stride()) == (table.data_ptr(), table.shape, table.stride())


def _overlapping(layout: DecoderLayout) -> set[int]:
    """Addresses of weights whose memory is also that of another linear, or of the embedding."""
    spans = [] if is_tied(layout) else [(*span(layout.embedding), -1)]
    spans += [(*span(weight), number) for number, one in enumerate(linears(layout)) for weight in one.weights]
    shared: set[int] = set()
    reached, by = (0, 0), -2
    for start, end, number in sorted(spans):
        if start < reached[1] and number != by:
            shared |= {start, reached[0]}
        if end >= reached[1]:
            reached, by = (start, end), number
    return shared

"""Tile memory: where a packed linear's tiles lie, as they are or compact.

Compact weights take 12 bits a number and lose nothing (`native/compact_order.h`): a step that waits for memory waits
for three quarters of it. What may not live here: what is packed (`packing.py`), and what is done with it.
"""

import ctypes
import logging
import mmap
from ctypes import CDLL
from typing import Final, NamedTuple, Protocol

from holdfast.worker.decoder.cpu.arena import Arena, address_of, mapped_memory
from holdfast.worker.errors import ReplicaError

logger = logging.getLogger(__name__)

COMPACT_CLASSES: Final = frozenset({"avx512bf16", "avx512"})
"""Instruction classes that keep bfloat16 compact: where reading it was measured to cost less than it saves."""
PANEL: Final = 32
"""Outputs of a panel: the least that is compact by itself."""

_TILE_OUTPUTS: Final = 16
_PLACE_OF_MARK, _KEPT_AS_TILES = 16, 0xFFFF


class TileShape(NamedTuple):
    """Of a packed linear."""

    rows: int
    """Outputs, filled up to whole groups."""
    row_bytes: int
    """Of an output's numbers, filled up to whole tiles."""
    k_tiles: int
    """Tiles of an output."""


class TileMemory(Protocol):
    """Memory for the tiles of one linear."""

    address: int
    panel_bytes: int
    """Of a compact panel; 0: the tiles lie as they are."""

    def room(self, first: int) -> int:
        """Where to write the tiles of rows `first` onwards."""

    def written(self, first: int, count: int) -> None:
        """They are written there."""


class PlainTiles:
    """Tiles as they are."""

    panel_bytes = 0

    def __init__(self, arena: Arena, shape: TileShape) -> None:
        self.address = arena.take(shape.rows * shape.row_bytes)
        self._row_bytes = shape.row_bytes

    def room(self, first: int) -> int:
        return self.address + first * self._row_bytes

    def written(self, first: int, count: int) -> None:
        """They lie where they stay."""


class Compactor:
    """Makes tiles compact, on the threads of a pool. Has room for some of them as they are."""

    def __init__(self, library: CDLL, pool: int, room_bytes: int) -> None:
        self._library, self._pool = library, pool
        self._room_bytes = room_bytes
        self._room: mmap.mmap | None = None

    @property
    def room(self) -> int:
        if self._room is None:
            self._room = mapped_memory(self._room_bytes)
        return address_of(self._room)

    def panel_bytes(self, k_tiles: int) -> int:
        return int(self._library.hf_compact_bytes(k_tiles * PANEL // _TILE_OUTPUTS))

    def compact(self, tiles: int, rows: int, k_tiles: int, out: int) -> bool:
        """Writes compact panels to `out`. False: they do not fit, and what was written is of no use."""
        return not self._outcome(
            self._library.hf_compact(self._pool, tiles, rows // PANEL, k_tiles * PANEL // _TILE_OUTPUTS, out)
        )

    def expand(self, panels: int, rows: int, k_tiles: int, out: int) -> None:
        """Writes the tiles of compact panels to `out`, as they were."""
        self._outcome(self._library.hf_expand(self._pool, panels, rows // PANEL, k_tiles * PANEL // _TILE_OUTPUTS, out))

    def _outcome(self, outcome: int) -> int:
        if outcome < 0:
            raise ReplicaError(f"the executor's threads did not make weights compact ({outcome})")
        return outcome


class CompactTiles:
    """Tiles made compact piece by piece. A weight whose exponents are too many is kept as tiles after all."""

    def __init__(self, arena: Arena, shape: TileShape, compactor: Compactor) -> None:
        self._arena, self._shape, self._compactor = arena, shape, compactor
        self._tiles: PlainTiles | None = None
        self.panel_bytes = compactor.panel_bytes(shape.k_tiles)
        self.address = arena.take(shape.rows // PANEL * self.panel_bytes)
        if arena.is_packed and self._mark.value == _KEPT_AS_TILES:
            self._keep_tiles()

    def room(self, first: int) -> int:
        return self._compactor.room if self._tiles is None else self._tiles.room(first)

    def written(self, first: int, count: int) -> None:
        if self._tiles is not None:
            return
        shape, compactor = self._shape, self._compactor
        if compactor.compact(compactor.room, count, shape.k_tiles, self._panel(first)):
            return
        logger.info("a weight of %d rows has too many exponents to be compact", shape.rows)
        panels = self.address
        mark = self._mark
        tiles = self._keep_tiles()
        if first:
            compactor.expand(panels, first, shape.k_tiles, tiles.address)
        ctypes.memmove(tiles.room(first), compactor.room, count * shape.row_bytes)
        mark.value = _KEPT_AS_TILES  # others that find this memory packed are told by it

    def _keep_tiles(self) -> PlainTiles:
        self._tiles = PlainTiles(self._arena, self._shape)
        self.address, self.panel_bytes = self._tiles.address, 0
        return self._tiles

    def _panel(self, row: int) -> int:
        return self.address + row // PANEL * self.panel_bytes

    @property
    def _mark(self) -> ctypes.c_uint16:
        """Of the first panel: where the rare numbers of its first tile begin, which is 0 where a weight is compact."""
        return ctypes.c_uint16.from_address(self.address + _PLACE_OF_MARK)

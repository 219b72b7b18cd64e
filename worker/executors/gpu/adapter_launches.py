"""Launches of the kernels of adapters: the linears that may have some, and the tiles of rows that share an adapter."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from holdfast.worker.executors.adapters import EMBEDDING, HEAD, adaptable
from holdfast.worker.executors.gpu.kernels import adapters as kernels
from holdfast.worker.executors.gpu.launches import Launch
from holdfast.worker.executors.gpu.linear_tiles import LinearTile
from holdfast.worker.executors.gpu.mixtures import MixtureLaunches, RowGroups
from holdfast.worker.executors.layout import DecoderLayout, Mlp, attention_of

PIECE: Final[int] = kernels.PIECE.value
RANKS: Final[int] = kernels.RANKS.value
WORDS: Final[int] = kernels.WORDS.value
MOST_RANKS: Final = 256
"""Most ranks of a module."""
_MOST_PARTS: Final = {"qkv": kernels.MAX_PARTS.value, "up": 2}
"""Modules of one linear; others are of one."""

_HALF_TILES: Final = (LinearTile(64, 16, 128, 4, 4), LinearTile(64, 64, 64, 4, 4))
_FLOAT_TILES: Final = (LinearTile(64, 16, 32, 4, 2), LinearTile(64, 64, 32, 4, 2))


@dataclass(frozen=True, slots=True)
class AdapterSite:
    """A linear that may have adapters."""

    number: int
    num_inputs: int
    num_outputs: int
    num_slices: int
    """Parts in which inputs are summed."""
    most_parts: int
    """Modules that its outputs are of."""

    @property
    def num_pieces(self) -> int:
        """Pieces of a slice, each of which is summed by itself."""
        return -(-self.num_inputs // self.num_slices // PIECE)

    @property
    def most_inner(self) -> int:
        """Inner numbers of a row."""
        return self.num_slices * self.num_pieces * self.most_parts * MOST_RANKS


def adapter_sites(layout: DecoderLayout) -> dict[str, AdapterSite]:
    """The linears of a device's layout that adapters may add to, by place: attention's, dense MLPs', the head, and the
    embedding.
    """
    found: dict[str, AdapterSite] = {}
    for place, linear in adaptable(layout).items():
        name = place.rpartition(".")[2]
        if name in ("qkv", "output", "up", "down") or place == HEAD:
            slices, parts = _num_slices(layout, place), _MOST_PARTS.get(name, 1)
            found[place] = AdapterSite(len(found), linear.in_features, linear.out_features, slices, parts)
    return found | {EMBEDDING: AdapterSite(len(found), len(layout.embedding), layout.hidden_size, 1, 1)}


def _num_slices(layout: DecoderLayout, place: str) -> int:
    index, _, name = place.partition(".")
    if name == "output":
        return attention_of(layout.layers[int(index)]).num_slices
    mlp = layout.layers[int(index)].mlp if name == "down" else None
    return mlp.num_slices if isinstance(mlp, Mlp) else 1


def adapter_tiles(dtype: torch.dtype) -> tuple[LinearTile, LinearTile]:
    """A narrow and a wide tile of rows."""
    return _FLOAT_TILES if dtype == torch.float32 else _HALF_TILES


class AdapterLaunches:
    """The kernels as functions of tensors. `table` [slots, sites, words], int64, has the records of all adapters."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._mixtures = MixtureLaunches(launch)

    def group(self, slots: Tensor, num_slots: int, groups: RowGroups) -> None:
        """slots [rows], int32 -> the contents of `groups`."""
        self._mixtures.group(slots, num_slots, groups)

    def shrink(self, site: AdapterSite, x: Tensor, table: Tensor, groups: RowGroups, inner: Tensor) -> None:
        """x [T, in] -> inner [slices * pieces, T, stride], float32: A x of each piece. As many blocks of ranks as the
        stride holds are computed.
        """
        num_sums, num_rows, stride = inner.shape
        slice_inputs = site.num_inputs // site.num_slices
        arguments = {
            "x": x,
            "inner": inner,
            **_shared(site, table, groups),
            "num_rows": num_rows,
            "num_inputs": site.num_inputs,
            "slice_inputs": slice_inputs,
            "stride": stride,
            "INPUTS": groups.tile.inputs,
            "PIECES": site.num_pieces,
            "EVEN": slice_inputs % PIECE == 0,
        }
        grid = (len(groups.experts), -(-stride // RANKS), num_sums)
        self._launch(
            kernels.shrink, grid, arguments, num_warps=groups.tile.num_warps, num_stages=groups.tile.num_stages
        )

    def look_up(
        self,
        site: AdapterSite,
        token_ids: Tensor,
        slots: Tensor,
        like: Tensor,
        table: Tensor,
        first_id: int,
        scale: float,
        inner: Tensor,
    ) -> None:
        """token_ids [T], int32, and their slots -> inner [1, T, stride]: columns of A, times `scale`."""
        stride = inner.shape[2]
        arguments = {
            "token_ids": token_ids,
            "slots": slots,
            "like": like,
            "table": table,
            "inner": inner,
            "first_id": first_id,
            "num_ids": site.num_inputs,
            "stride": stride,
            "site": site.number,
            "num_sites": table.shape[1],
            "scale": scale,
            "BLOCK": MOST_RANKS,
        }
        self._launch(kernels.look_up, (len(token_ids),), arguments, num_warps=1, num_stages=1)

    def expand(
        self,
        site: AdapterSite,
        inner: Tensor,
        like: Tensor,
        table: Tensor,
        part_of: Tensor,
        groups: RowGroups,
        out: Tensor,
    ) -> None:
        """Adds B (scale inner) to out [slices, T, out], float32. `part_of` [out], int32: each output's module."""
        num_slices, num_rows, num_outputs = out.shape
        arguments = {
            "inner": inner,
            "like": like,
            "part_of": part_of,
            "out": out,
            **_shared(site, table, groups),
            "num_rows": num_rows,
            "num_outputs": num_outputs,
            "stride": inner.shape[2],
            "OUTPUTS": groups.tile.outputs,
            "PIECES": len(inner) // num_slices,
        }
        grid = (len(groups.experts), -(-num_outputs // groups.tile.outputs), num_slices)
        self._launch(kernels.expand, grid, arguments, num_warps=groups.tile.num_warps, num_stages=1)


def _shared(site: AdapterSite, table: Tensor, groups: RowGroups) -> dict[str, object]:
    return {
        "table": table,
        "tile_slots": groups.experts,
        "tile_rows": groups.rows,
        "site": site.number,
        "num_sites": table.shape[1],
        "ROWS": groups.tile.tokens,
    }

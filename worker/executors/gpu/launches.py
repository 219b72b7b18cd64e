"""Launches of the Triton kernels: torch tensors in, the grid and the tile for a step's number of rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch import Tensor

from holdfast.worker.executors.gpu.kernels.attention import KEYS, SPLIT, attend, merge_splits
from holdfast.worker.executors.gpu.kernels.heads import split_heads
from holdfast.worker.executors.gpu.kernels.layers import activate, add_norm, cap, embed, linear, sum_parts
from holdfast.worker.executors.gpu.kernels.reports import COLUMNS, best_of_blocks, best_of_rows
from holdfast.worker.executors.gpu.linear_tiles import linear_tile, tile_for, weight_arguments
from holdfast.worker.executors.kv_cache import LayerCache
from holdfast.worker.executors.layout import Activation, Attention
from holdfast.worker.executors.layout_arithmetic import next_power
from holdfast.worker.executors.linears import Linear, Norm

SPLIT_KEYS: Final[int] = SPLIT.value
KEY_TILE: Final[int] = KEYS.value

_NORM_KINDS: Final = {"rms": 1, "layer": 2}
_ACTIVATIONS: Final = tuple(Activation)
_FULL_DEVICE: Final = 256
"""Programs of attention that keep a device busy: fewer are cut at the splits of the keys."""
MAX_OUTSIDE_SPLITS: Final = 4096
"""Programs of splits, which bounds the memory for their sums."""

_ACTIVATION_BLOCK: Final = 1024  # values of a program
_SUM_BLOCK: Final = 1024  # values of a program


class Launch(Protocol):
    """Starts a kernel on a grid."""

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], *, num_warps: int, num_stages: int
    ) -> None: ...


def triton_launch(
    kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], *, num_warps: int, num_stages: int
) -> None:
    """Compiles the kernel at its first use. Products and sums are not contracted: where a kernel has two forms, both
    round alike.
    """
    kernel[grid](**arguments, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False)


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Query tiles of a launch: one kind, with this many columns."""

    table: Tensor
    """[tiles, 3], int32: first row, number of rows, sequence. Tiles of no rows are padding."""
    columns: int
    """Tokens of a tile times the query heads of a KV head fit."""
    num_splits: int
    """Splits that the longest context of these tiles has."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Inputs of a step that the kernels of all layers read."""

    token_ids: Tensor
    """[rows], int32; likewise positions and slots. A padding row has slot -1."""
    positions: Tensor
    slots: Tensor
    tables: Tensor
    """[sequences, blocks], int32"""
    tiles: tuple[AttentionTiles, ...]
    adapted: "AdaptedRows | None" = None
    """The adapters of its rows; None: no row has one."""

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Slots of the adapters of a step's rows."""

    slots: Tensor
    """[rows], int32, from 0 on; -1: the row has none"""
    wanted: Tensor
    """[rows wanted], likewise"""
    is_narrow: bool
    """Whether tiles of rows are the narrowest, for few rows of each adapter."""


@dataclass(frozen=True, slots=True)
class SplitSpace:
    """Memory for the sums of attention splits that are separate programs; flat, float32. Room for `MAX_OUTSIDE_SPLITS`
    programs of the widest tile.
    """

    totals: Tensor
    bests: Tensor
    weights: Tensor


def splits_outside(num_tiles: int, num_kv_heads: int, num_splits: int) -> bool:
    """Whether the splits of a launch are separate programs: otherwise it would leave most of a device idle."""
    num_programs = num_tiles * num_kv_heads
    return num_splits > 1 and num_programs < _FULL_DEVICE and num_programs * num_splits <= MAX_OUTSIDE_SPLITS


def rounded_splits(num_rows: int, num_kv_heads: int, num_splits: int, max_positions: int) -> int:
    """The splits that a graph of this many rows is captured for: a power of two, so that contexts may grow without a
    new graph; or 1, if the attention programs loop over all splits.
    """
    rounded = min(-(-max_positions // SPLIT_KEYS), 1 << max(0, num_splits - 1).bit_length())
    return rounded if splits_outside(num_rows, num_kv_heads, rounded) else 1


class Launches:
    """The kernels as functions of tensors. All rows of a tensor are used; buffers are cut before."""

    def __init__(self, launch: Launch = triton_launch) -> None:
        self._launch = self.launch = launch

    def embed(self, token_ids: Tensor, table: Tensor, first_id: int, scale: float, residual: Tensor) -> None:
        """Fills the residual stream [T, hidden], float32."""
        hidden = residual.shape[1]
        arguments = {
            "token_ids": token_ids,
            "table": table,
            "residual": residual,
            "first_id": first_id,
            "num_ids": len(table),
        }
        more = {"hidden": hidden, "scale": scale, "BLOCK": next_power(hidden)}
        self._launch(embed, (len(residual),), {**arguments, **more}, num_warps=_warps(hidden), num_stages=1)

    def linear(
        self, x: Tensor, weights: Linear, out: Tensor, *, scale: float = 1.0, softcap: float | None = None
    ) -> None:
        """x [T, in] -> out [slices, T, out], float32. The bias only of a linear of one slice."""
        (weight,) = weights.parts
        num_slices, num_rows, num_outputs = out.shape
        num_inputs = weights.in_features
        tile = tile_for(weight, linear_tile(num_rows, x.dtype), num_inputs // num_slices)
        bias = weights.bias if num_slices == 1 else None
        arguments = {
            "x": x,
            **weight_arguments(weight, tile.inputs),
            "bias": out if bias is None else bias,
            "out": out,
            "num_rows": num_rows,
            "num_inputs": num_inputs,
            "num_outputs": num_outputs,
            "slice_inputs": num_inputs // num_slices,
            "scale": scale,
            "softcap": softcap or 0.0,
            "OUTPUTS": tile.outputs,
            "TOKENS": tile.tokens,
            "INPUTS": tile.inputs,
            "EVEN": num_inputs // num_slices % tile.inputs == 0,
            "HAS_BIAS": bias is not None,
            "HAS_SCALE": scale != 1.0,
            "HAS_SOFTCAP": softcap is not None,
        }
        grid = (-(-num_rows // tile.tokens), -(-num_outputs // tile.outputs), num_slices)
        self._launch(linear, grid, arguments, num_warps=tile.num_warps, num_stages=tile.num_stages)

    def cap(self, logits: Tensor, scale: float, softcap: float | None) -> None:
        """Scale and softcap of `linear`, applied to its sums in place. logits: all of a tensor, float32."""
        flags = {"HAS_SCALE": scale != 1.0, "HAS_SOFTCAP": softcap is not None}
        if not any(flags.values()):
            return
        arguments = {"x": logits, "num_values": logits.numel(), "scale": scale, "softcap": softcap or 0.0}
        grid = (-(-logits.numel() // _SUM_BLOCK),)
        self._launch(cap, grid, {**arguments, "BLOCK": _SUM_BLOCK, **flags}, num_warps=4, num_stages=1)

    def sum_parts(self, parts: Tensor, out: Tensor) -> None:
        """parts [1, 2, 4 or 8, T, hidden] -> out [T, hidden], float32, added as a binary tree."""
        arguments = {"parts": parts, "out": out, "num_values": out.numel(), "BLOCK": _SUM_BLOCK, "PARTS": len(parts)}
        self._launch(sum_parts, (-(-out.numel() // _SUM_BLOCK),), arguments, num_warps=4, num_stages=1)

    def add_norm(
        self,
        residual: Tensor,
        parts: Tensor | None,
        norm: Norm | None,
        out: Tensor | None,
        *,
        bias: Tensor | None = None,
        out_norm: Norm | None = None,
        scale: float = 1.0,
        wanted: Tensor | None = None,
        progress: Tensor | None = None,
    ) -> None:
        """`residual += scale * out_norm(sum of parts + bias)`, then `out = norm(residual)`, where these are.

        residual, parts and out have rows of equal length. With `wanted` [W], int32, only of these rows, and the
        residual stream is left as it was. `progress` [1], int64, is moved by one.
        """
        num_rows, hidden = residual.shape
        of_out, of_norm = _norm("out_", "OUT_", out_norm, residual), _norm("", "", norm, residual)
        arguments = {
            "residual": residual,
            "parts": residual if parts is None else parts,
            "parts_bias": residual if bias is None else bias,
            "out": residual if out is None else out,
            "wanted": residual if wanted is None else wanted,
            "progress": residual if progress is None else progress,
            "num_rows": num_rows,
            "hidden": hidden,
            "residual_scale": scale,
            **of_out,
            **of_norm,
            "residual_stride": residual.stride(0),
            "out_stride": hidden if out is None else out.stride(0),
            "BLOCK": next_power(hidden),
            "PARTS": 0 if parts is None else len(parts),
            "HAS_PARTS_BIAS": bias is not None,
            "SELECTS": wanted is not None,
            "WRITES_OUT": out is not None,
            "COUNTS": progress is not None,
        }
        grid = (num_rows if wanted is None else len(wanted),)
        self._launch(add_norm, grid, arguments, num_warps=_warps(hidden), num_stages=1)

    def split_heads(
        self,
        attention: Attention,
        qkv: Tensor,
        step: StepTensors,
        angles: Tensor | None,
        interleaved: bool,
        queries: Tensor,
        pages: LayerCache,
    ) -> None:
        """qkv [T, all heads], float32 -> queries [T, heads * dim], and the slots of keys and values. A norm over all
        heads together has been applied.
        """
        of_query = _norm("query_", "QUERY_", _per_head(attention.query_norm, attention.head_dim), qkv)
        of_key = _norm("key_", "KEY_", _per_head(attention.key_norm, attention.head_dim), qkv)
        has_own = attention.query_norm is not None and attention.query_norm.weight.dim() == 2
        arguments = {
            "qkv": qkv,
            "positions": step.positions,
            "slots": step.slots,
            "angles": qkv if angles is None else angles,
            "queries": queries,
            **_pools(pages),
            **of_query,
            **of_key,
            "weight_stride": attention.head_dim if has_own else 0,
            "HEADS": attention.num_heads,
            "KV_HEADS": attention.num_kv_heads,
            "HEAD_DIM": attention.head_dim,
            "BLOCK": next_power(attention.head_dim),
            "PAIRS": 0 if angles is None else angles.shape[2],
            "INTERLEAVED": interleaved,
            "SLOTS": 0 if pages.key_scales is None else pages.keys.shape[1],
        }
        grid = (step.num_rows, attention.num_heads + 2 * attention.num_kv_heads)
        self._launch(split_heads, grid, arguments, num_warps=1, num_stages=1)

    def attend(
        self,
        attention: Attention,
        queries: Tensor,
        pages: LayerCache,
        step: StepTensors,
        space: SplitSpace,
        out: Tensor,
    ) -> None:
        """queries [T, heads * dim of keys] -> out [T, heads * dim of values]. The step's keys and values are there."""
        block_size = pages.keys.shape[1]
        value_dim = 0 if pages.values.shape[3] == attention.head_dim else pages.values.shape[3]
        for tiles in step.tiles:
            outside = splits_outside(len(tiles.table), attention.num_kv_heads, tiles.num_splits)
            shared = {
                "out": out,
                "split_totals": space.totals,
                "split_bests": space.bests,
                "split_weights": space.weights,
                "tiles": tiles.table,
                "positions": step.positions,
                "sinks": queries if attention.sinks is None else attention.sinks,
                "KV_HEADS": attention.num_kv_heads,
                "GROUP": attention.num_heads // attention.num_kv_heads,
                "HEAD_DIM": attention.head_dim,
                "DIMS": max(16, next_power(attention.head_dim)),
                "ROWS": tiles.columns,
                "WINDOW": attention.sliding_window or 0,
                "HAS_SINKS": attention.sinks is not None,
                "VALUE_DIM": value_dim,
                "VALUE_DIMS": max(16, next_power(value_dim)) if value_dim else 0,
            }
            arguments = {
                "queries": queries,
                **_pools(pages),
                "tables": step.tables,
                "table_stride": step.tables.stride(0),
                "scaling": attention.scaling,
                "softcap": attention.softcap or 0.0,
                "BLOCK": block_size,
                "HAS_SOFTCAP": attention.softcap is not None,
                "SPLITS_OUTSIDE": outside,
                "TILES_IN_BLOCKS": block_size % KEY_TILE == 0,
            }
            grid = (len(tiles.table), attention.num_kv_heads, tiles.num_splits if outside else 1)
            self._launch(attend, grid, {**shared, **arguments}, num_warps=4, num_stages=2)
            if outside:
                self._launch(merge_splits, grid[:2], shared, num_warps=4, num_stages=1)

    def activate(self, up: Tensor, activation: Activation, has_gate: bool, out: Tensor) -> None:
        """up [T, inner or twice that], float32 -> out [T, inner]."""
        num_rows, inner = out.shape
        kind = _ACTIVATIONS.index(activation)
        arguments = {
            "up": up,
            "out": out,
            "inner": inner,
            "BLOCK": _ACTIVATION_BLOCK,
            "KIND": kind,
            "HAS_GATE": has_gate,
        }
        self._launch(activate, (num_rows, -(-inner // _ACTIVATION_BLOCK)), arguments, num_warps=4, num_stages=1)

    def best_of_blocks(self, logits: Tensor, num_columns: int, bests: Tensor, places: Tensor) -> None:
        """logits [W, stride] of `num_columns` -> bests [W, blocks, 3], float32, and places [W, blocks], int32."""
        num_rows, num_blocks = places.shape
        arguments = {
            "logits": logits,
            "bests": bests,
            "places": places,
            "num_columns": num_columns,
            "num_blocks": num_blocks,
        }
        more = {"stride": logits.stride(0)}
        self._launch(best_of_blocks, (num_rows, num_blocks), {**arguments, **more}, num_warps=4, num_stages=1)

    def best_of_rows(self, bests: Tensor, places: Tensor, rank_columns: int, tokens: Tensor, sums: Tensor) -> None:
        """bests [ranks, W, blocks, 3], places [ranks, W, blocks] -> tokens [W], int32, and log-sums-exp [W]."""
        num_ranks, num_rows, num_blocks = places.shape
        arguments = {"bests": bests, "places": places, "tokens": tokens, "logsumexps": sums, "num_rows": num_rows}
        more = {"num_blocks": num_blocks, "num_ranks": num_ranks, "rank_columns": rank_columns}
        self._launch(best_of_rows, (num_rows,), {**arguments, **more}, num_warps=1, num_stages=1)


def num_vocab_blocks(num_columns: int) -> int:
    """Blocks of `best_of_blocks`."""
    return -(-num_columns // int(COLUMNS.value))


def _pools(pages: LayerCache) -> dict[str, Any]:
    """Keys and values of a layer, and their scales where they are in fp8."""
    in_fp8 = pages.key_scales is not None
    scales = {"key_scales": pages.key_scales, "value_scales": pages.value_scales}
    nothing = {"key_scales": pages.keys, "value_scales": pages.values}
    return {"keys": pages.keys, "values": pages.values, **(scales if in_fp8 else nothing), "IN_FP8": in_fp8}


def _norm(prefix: str, flag: str, norm: Norm | None, nothing: Tensor) -> dict[str, Any]:
    """A norm's arguments."""
    if norm is None:
        off = {f"{prefix}weight": nothing, f"{prefix}bias": nothing, f"{prefix}eps": 0.0}
        return {**off, f"{flag}KIND": 0, f"HAS_{flag}BIAS": False}
    bias = nothing if norm.bias is None else norm.bias
    on = {f"{prefix}weight": norm.weight, f"{prefix}bias": bias, f"{prefix}eps": norm.eps}
    return {**on, f"{flag}KIND": _NORM_KINDS[norm.kind], f"HAS_{flag}BIAS": norm.bias is not None}


def _per_head(norm: Norm | None, head_dim: int) -> Norm | None:
    """The norm, if it is taken over each head by itself."""
    return norm if norm is not None and (norm.weight.dim() == 2 or norm.weight.numel() == head_dim) else None


def _warps(hidden: int) -> int:
    """Warps of a program that takes a row of `hidden` values."""
    return min(16, max(1, next_power(hidden) // 512))

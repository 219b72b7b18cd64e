"""Attention on a GPU by torch's kernels, where the paged kernels do not serve: gather the blocks, attend tile by tile.

Layers with a softcap or sinks, which torch's fused kernel does not
support, use an explicit softmax; both follow the position rule of `gpu_query_tiles.py`.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.worker.distributed.step_batch import IntArray, StepBatch
from holdfast.worker.executors.kv_cache import TILE_TOKENS, KVCache, KVSpec, LayerCache
from holdfast.worker.models.gpu_attention_trial import TRIAL_BLOCK_SIZE, choose_rule
from holdfast.worker.models.gpu_query_tiles import TileCall, cut_into_tiles
from holdfast.worker.models.gpu_row_rules import RowRule, RowRules


class GatherAttention:
    """The attention kernels of one rank, one for each kind of layer in its cache."""

    def __init__(self, cache: KVCache, rules: RowRules) -> None:
        """Tries out, on this machine, how many rows each kind of layer in the cache may be called with."""
        keys = cache.layers[0].keys
        kernel = partial(TiledAttention, dtype=keys.dtype, device=rules.device)
        self._cache = cache
        self._kernels: dict[KVSpec, TiledAttention] = {}
        for spec in dict.fromkeys(layer.spec for layer in cache.layers):
            rule = choose_rule(spec, rules, keys.dtype, partial(kernel, block_size=TRIAL_BLOCK_SIZE))
            self._kernels[spec] = kernel(spec, rule, block_size=cache.block_size)
        self._slots = torch.zeros(0, dtype=torch.int64, device=keys.device)
        """[T]: where each token of the step is written, as block * block_size + offset."""

    def begin(self, batch: StepBatch) -> None:
        """The layers that follow run on this step. Clears the blocks that it begins and does not fill.

        So the slots beyond a sequence's tokens hold zeros or its own values: masked keys never bring in another's NaN.
        """
        block_size, device = self._cache.block_size, self._slots.device
        self._slots = torch.from_numpy(slots_of(batch, block_size)).to(device)
        begun = begun_blocks(batch, block_size)
        if len(begun):
            self._cache.clear(torch.from_numpy(begun).to(device))
        for kernel in self._kernels.values():
            kernel.begin(batch)

    def write(self, layer: LayerCache, key: Tensor, value: Tensor) -> None:
        """key [num_kv_heads, T, key_dim] and value [num_kv_heads, T, value_dim] go to the step's slots."""
        for pool, new in ((layer.keys, key), (layer.values, value)):
            rows = new.transpose(0, 1).reshape(len(self._slots), -1)
            pool.view(-1, rows.shape[1]).index_copy_(0, self._slots, rows)

    def attend(self, layer: LayerCache, query: Tensor, scaling: float, sinks: Tensor | None) -> Tensor:
        """query [T, num_heads, key_dim], sinks [num_heads] -> [T, num_heads, value_dim]. The keys are written."""
        return self._kernels[layer.spec].attend(layer, query, scaling, sinks)


@dataclass(frozen=True, slots=True)
class _PreparedCall:
    """One call, ready for every layer of the kind."""

    shape: TileCall
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _PreparedStep:
    """One step, ready for every layer of the kind."""

    query_rows: Tensor
    output_rows: Tensor
    calls: tuple[_PreparedCall, ...]


class TiledAttention:
    """Attention of one kind of layer: its tiles are laid out once per step, when its first layer runs."""

    def __init__(
        self, spec: KVSpec, rule: RowRule, *, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._spec = spec
        self._rule = rule
        self._block_size = block_size
        self._device = device
        self._masks = _MaskTable(spec.sliding_window, dtype, device)
        self._attend_tiles = _attend_explicitly if spec.softcap is not None or spec.has_sinks else _attend_fused
        self._batch: StepBatch | None = None
        self._step: _PreparedStep | None = None

    def begin(self, batch: StepBatch) -> None:
        self._batch = batch
        self._step = None

    def attend(self, layer: LayerCache, query: Tensor, scaling: float, sinks: Tensor | None) -> Tensor:
        step = self._step or self._prepare()
        spec = self._spec
        rows = query.reshape(-1, spec.key_dim).index_select(0, step.query_rows)
        outputs = [self._run(call, layer, rows, scaling, sinks) for call in step.calls]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.index_select(0, step.output_rows).view(-1, spec.num_heads, spec.value_dim)

    def _run(
        self, call: _PreparedCall, layer: LayerCache, rows: Tensor, scaling: float, sinks: Tensor | None
    ) -> Tensor:
        """One call's output rows, [num_tiles * num_rows * num_kv_heads, value_dim]."""
        spec, shape = self._spec, call.shape
        num_tiles, num_heads = shape.num_tiles, spec.num_kv_heads
        query = rows.narrow(0, shape.first_row * num_heads, num_tiles * shape.num_rows * num_heads)
        query = query.view(num_tiles, shape.num_rows, num_heads, spec.key_dim).transpose(1, 2)
        keys = layer.keys.index_select(0, call.blocks).view(num_tiles, -1, num_heads, spec.key_dim)
        values = layer.values.index_select(0, call.blocks).view(num_tiles, -1, num_heads, spec.value_dim)
        if keys.shape[1] != shape.num_keys:
            keys = keys.narrow(1, shape.num_skipped, shape.num_keys)
            values = values.narrow(1, shape.num_skipped, shape.num_keys)
        output = self._attend_tiles(
            query, keys.transpose(1, 2), values.transpose(1, 2), call.mask, scaling, spec.softcap, sinks
        )
        return output.transpose(1, 2).reshape(-1, spec.value_dim)

    def _prepare(self) -> _PreparedStep:
        assert self._batch is not None, "a step begins before its layers run"
        tiles = cut_into_tiles(self._batch, self._spec, self._rule, self._block_size)
        offsets, block_ids = self._tensor(tiles.offsets), self._tensor(tiles.block_ids)
        self._step = _PreparedStep(
            query_rows=self._tensor(tiles.query_rows).view(-1),
            output_rows=self._tensor(tiles.output_rows),
            calls=tuple(self._prepare_call(call, offsets, block_ids) for call in tiles.calls),
        )
        return self._step

    def _prepare_call(self, call: TileCall, offsets: Tensor, block_ids: Tensor) -> _PreparedCall:
        rows = offsets.narrow(0, call.first_row, call.num_tiles * call.num_rows)
        if call.one_token:
            rows = rows[:: call.num_rows]
        mask = self._masks.rows(rows, call.num_keys).view(call.num_tiles, 1, -1, call.num_keys)
        return _PreparedCall(call, block_ids.narrow(0, call.first_block, call.num_tiles * call.num_blocks), mask)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class _MaskTable:
    """Attention masks by a query's offset in its tile, over the keys up to the tile's end: 0, or -inf where hidden.

    One table serves any number of keys, since its columns count from the end. It grows when a step needs more.
    """

    def __init__(self, sliding_window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        self._window = sliding_window
        self._dtype = dtype
        self._device = device
        self._table = self._made(TILE_TOKENS)

    def rows(self, offsets: Tensor, num_keys: int) -> Tensor:
        """[len(offsets), num_keys], to be added to the scores."""
        if self._table.shape[1] < num_keys:
            self._table = self._made(max(num_keys, 2 * self._table.shape[1]))
        return self._table[:, -num_keys:].index_select(0, offsets)

    def _made(self, num_keys: int) -> Tensor:
        query = torch.arange(TILE_TOKENS, device=self._device)[:, None]
        key = torch.arange(TILE_TOKENS - num_keys, TILE_TOKENS, device=self._device)
        hidden = key > query
        if self._window is not None:
            hidden |= query - key >= self._window
        table = torch.zeros(TILE_TOKENS, num_keys, dtype=self._dtype, device=self._device)
        return table.masked_fill_(hidden, float("-inf"))


def slots_of(batch: StepBatch, block_size: int) -> IntArray:
    """[T]: where in the pools each token's key and value go."""
    sequence_of_token = np.repeat(np.arange(len(batch.num_tokens)), batch.num_tokens)
    positions = batch.positions
    return batch.blocks_of(sequence_of_token, positions // block_size) * block_size + positions % block_size


def begun_blocks(batch: StepBatch, block_size: int) -> IntArray:
    """Blocks whose first token is of this step and that this step does not fill: at most one per sequence."""
    ends = batch.first_positions + batch.num_tokens
    last_blocks = (ends - 1) // block_size
    is_begun = (last_blocks * block_size >= batch.first_positions) & (ends % block_size != 0)
    return batch.blocks_of(np.flatnonzero(is_begun), last_blocks[is_begun])


def _attend_fused(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [B, Hkv, R, D], keys [B, Hkv, L, D], values [B, Hkv, L, Dv], mask [B, 1, R or 1, L] -> [B, Hkv, R, Dv]."""
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)


def _attend_explicitly(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As `_attend_fused`, with scores capped before the mask, and a sink: one more score per head, with no value.

    In float32 throughout, as the fused kernel has it inside: a score of 50 in bfloat16 would be off by 0.1.
    """
    scores = torch.matmul(query.float(), keys.float().transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sink = _sink_rows(sinks.float(), *scores.shape[:3])
        weights = torch.softmax(torch.cat((scores, sink), -1), dim=-1)[..., :-1]
    return torch.matmul(weights, values.float()).to(values.dtype)


def _sink_rows(sinks: Tensor, num_tiles: int, num_kv_heads: int, num_rows: int) -> Tensor:
    """Each row's sink, [B, Hkv, R, 1]: rows are token by token, and within a token head by head."""
    by_group = sinks.view(num_kv_heads, -1)
    repeats = -(-num_rows // by_group.shape[1])
    return by_group.repeat(1, repeats)[:, :num_rows, None].expand(num_tiles, -1, -1, -1)

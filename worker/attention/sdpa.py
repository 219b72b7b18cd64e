"""Attention with torch's own kernels: gather the blocks, attend tile by tile. For CPUs, and the oracle elsewhere.

Works on any device and for every kind of layer. Layers with a softcap or sinks, which torch's fused kernel does not
know, take an explicit softmax; both follow the position rule of `query_tiles.py`. Nothing here writes to the cache.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from worker.attention.query_tiles import TileCall, cut_into_tiles
from worker.kv_cache import TILE_TOKENS, KVCache, KVSpec, LayerCache
from worker.row_tiles import RowRule, RowTiles
from worker.step_batch import StepBatch

_TRIED_KEYS = (64, 320, 576, 1088)
"""Numbers of keys a trial attends to: torch walks keys in steps of 512, so both sides of one and two of them."""

_TRIED_CHUNKS = (
    (1, 1),
    (1, 3),
    (2, 1),
    (2, 3),
    (3, 1),
    (4, 3),
    (5, 1),
    (7, 1),
    (8, 3),
    (16, 1),
    (17, 1),
    (33, 1),
    (48, 1),
)
"""Chunks in a trial: tokens of a sequence, and sequences in the batch. The whole tile has 64 tokens."""

_CANDIDATES = (
    *(RowRule(multiple_of=rows) for rows in (4, 8, 16, 32)),
    RowRule(multiple_of=32, max_rows=32),
)


class SdpaBackend:
    """The attention kernels of one rank, one for each kind of layer in its cache."""

    def __init__(self, specs: Iterable[KVSpec], tiles: RowTiles, *, block_size: int, dtype: torch.dtype) -> None:
        """Tries out, on this machine, how many rows each kind of layer may be called with."""
        self._kernels = {
            spec: _TiledAttention(spec, _choose_rule(spec, tiles, dtype), block_size, dtype, tiles.device)
            for spec in set(specs)
        }

    def begin(self, batch: StepBatch) -> None:
        """The layers that follow run on this step."""
        for kernel in self._kernels.values():
            kernel.begin(batch)

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


class _TiledAttention:
    """Attention of one kind of layer: its tiles are laid out once per step, when its first layer runs."""

    def __init__(self, spec: KVSpec, rule: RowRule, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
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
    """What a query sees of the keys before the end of its tile, by its offset in the tile: 0, or -inf where nothing.

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
    """As `_attend_fused`, with scores capped before the mask, and a sink: one more score per head, with no value."""
    scores = torch.matmul(query, keys.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is None:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    else:
        sink = _sink_rows(sinks, *scores.shape[:3])
        weights = torch.softmax(torch.cat((scores, sink), -1), dim=-1, dtype=torch.float32)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)


def _sink_rows(sinks: Tensor, num_tiles: int, num_kv_heads: int, num_rows: int) -> Tensor:
    """Each row's sink, [B, Hkv, R, 1]: rows are token by token, and within a token head by head."""
    by_group = sinks.view(num_kv_heads, -1)
    repeats = -(-num_rows // by_group.shape[1])
    return by_group.repeat(1, repeats)[:, :num_rows, None].expand(num_tiles, -1, -1, -1)


def _choose_rule(spec: KVSpec, tiles: RowTiles, dtype: torch.dtype) -> RowRule:
    """The rows that layers of this kind may be called with, found by trial."""
    kind = "" if spec.softcap is None and not spec.has_sinks else " explicit"
    heads = f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.key_dim}/{spec.value_dim}"
    name = f"attention{kind} {heads} {str(dtype).removeprefix('torch.')}"
    return tiles.choose(name, _CANDIDATES, lambda rule: _rows_agree(spec, rule, dtype, tiles.device))


def _rows_agree(spec: KVSpec, rule: RowRule, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a query's output has the same bits in a whole tile and in chunks of it, in company or alone."""
    kernel = _TiledAttention(spec, rule, TILE_TOKENS, dtype, device)
    generator = torch.Generator().manual_seed(0)
    num_blocks = max(_TRIED_KEYS) // TILE_TOKENS
    (layer,) = KVCache.allocate([spec], num_blocks, TILE_TOKENS, dtype, device).layers
    for pool in (layer.keys, layer.values):
        pool.copy_(torch.randn(pool.shape, generator=generator))
    query = torch.randn(TILE_TOKENS, spec.num_heads, spec.key_dim, generator=generator).to(device, dtype) * 3
    sinks = torch.zeros(spec.num_heads, dtype=dtype, device=device) if spec.has_sinks else None

    def attend(rows: Tensor, first_positions: list[int]) -> Tensor:
        kernel.begin(_trial_batch(first_positions, len(rows) // len(first_positions)))
        return kernel.attend(layer, rows, spec.key_dim**-0.5, sinks)

    for num_keys in _TRIED_KEYS:
        tile_start = num_keys - TILE_TOKENS
        whole = attend(query, [tile_start])
        for count, company in _TRIED_CHUNKS:
            first = (TILE_TOKENS - count) // 2
            part = slice(first, first + count)
            output = attend(query[part].repeat(company, 1, 1), [tile_start + first] * company)
            if not torch.equal(output, whole[part].repeat(company, 1, 1)):
                return False
    return True


def _trial_batch(first_positions: list[int], num_tokens: int) -> StepBatch:
    """Sequences with `num_tokens` tokens each, all reading the same blocks, 0, 1, 2, ..."""
    num_sequences = len(first_positions)
    firsts = np.array(first_positions, dtype=np.int64)
    counts = np.full(num_sequences, num_tokens, dtype=np.int64)
    table = np.arange((max(first_positions) + num_tokens - 1) // TILE_TOKENS + 1)
    return StepBatch(
        step_id=0,
        token_ids=np.zeros(num_sequences * num_tokens, dtype=np.int64),
        positions=(firsts[:, None] + np.arange(num_tokens)).ravel(),
        first_positions=firsts,
        num_tokens=counts,
        num_draws=np.zeros_like(counts),
        block_ids=np.tile(table, num_sequences),
        num_blocks=np.full(num_sequences, len(table), dtype=np.int64),
        logits_rows=np.zeros(0, dtype=np.int64),
    )

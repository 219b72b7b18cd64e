"""Proof of attention kernels at load: they write what they are given, their errors are no larger than those of gather
and SDPA on the same pages, and a query has the same bits in any company.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.executors.kv_cache import KVCache, KVSpec
from holdfast.worker.models.gpu_attention import GpuAttention
from holdfast.worker.models.gpu_attention_trial import TRIAL_BLOCK_SIZE, rows_agree
from holdfast.worker.models.gpu_gather import GatherAttention
from holdfast.worker.models.gpu_row_rules import RowRule, RowRules

RowsAgree = Callable[[GpuAttention, KVSpec, torch.dtype, torch.device], bool]

_SEQUENCES: Final = ((0, 5), (63, 2), (130, 1), (1022, 3))
"""First position and tokens of each, on both sides of a tile, and of a split of keys."""

MAX_POSITIONS: Final = 1088
"""Of a trial's longest sequence."""


class _Untried(RowRules):
    """Takes kernels as they come: an oracle's rows may differ in their last bits."""

    def choose(self, name: str, candidates: object, holds: object) -> RowRule:
        return RowRule()


def disagreement(
    kernels_for: Callable[[KVSpec, int], GpuAttention],
    spec: KVSpec,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    agree: RowsAgree = rows_agree,
) -> str | None:
    """Why kernels may not serve layers of this kind; None: they may. `kernels_for` makes them, for blocks of a size and
    sequences of `MAX_POSITIONS`.

    Their error against float64 may be twice that of gather and SDPA, and one rounding more.
    """
    ours, oracle = (_Pages(spec, block_size, dtype, device) for _ in range(2))
    sdpa = GatherAttention(oracle.cache, _Untried(device))
    error = _error(ours.attend(kernels_for(spec, block_size)), ours)
    theirs = _error(oracle.attend(sdpa), oracle)
    if not ours.same_pages(oracle):
        return "other keys or values are written"
    allowed = 2 * theirs + torch.finfo(dtype).eps * ours.largest_value
    if not error <= allowed:  # also if it is no number
        return f"its error is {error:.2g}, and gather and SDPA's is {theirs:.2g}"
    if not agree(kernels_for(spec, TRIAL_BLOCK_SIZE), spec, dtype, device):
        return "a query's bits depend on its company"
    return None


def _error(output: Tensor, pages: "_Pages") -> float:
    return float((output.double() - pages.exact()).abs().max())


class _Pages:
    """One layer's cache with random contents, and a step of some sequences on it; the same for the same kind."""

    def __init__(self, spec: KVSpec, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        counts = [-(-(first + count) // block_size) for first, count in _SEQUENCES]
        self.cache = KVCache.allocate([spec], sum(counts), block_size, dtype, device)
        generator = torch.Generator().manual_seed(spec.key_dim)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self._spec = spec
        self._layer = self.cache.layers[0]
        for pool in (self._layer.keys, self._layer.values):
            pool.copy_(random(*pool.shape))
        order = torch.randperm(sum(counts), generator=generator)
        self._tables = [table.to(device) for table in torch.split(order, counts)]
        self._batch = _batch(order.numpy(), counts)
        num_tokens = len(self._batch.token_ids)
        widths = [spec.num_heads * spec.key_dim, spec.num_kv_heads * spec.key_dim, spec.num_kv_heads * spec.value_dim]
        query, key, value = torch.split(random(num_tokens, sum(widths)), widths, 1)  # as of one fused projection
        self._query = query.view(num_tokens, spec.num_heads, spec.key_dim)
        self._key = key.view(num_tokens, spec.num_kv_heads, spec.key_dim).transpose(0, 1)
        self._value = value.view(num_tokens, spec.num_kv_heads, spec.value_dim).transpose(0, 1)
        self._sinks = random(spec.num_heads) if spec.has_sinks else None
        self._scaling = spec.key_dim**-0.5

    @property
    def largest_value(self) -> float:
        return float(self._layer.values.abs().max())

    def attend(self, kernels: GpuAttention) -> Tensor:
        """The step's output [T, num_heads, value_dim]; its keys and values are in the pages after it."""
        kernels.begin(self._batch)
        kernels.write(self._layer, self._key, self._value)
        return kernels.attend(self._layer, self._query, self._scaling, self._sinks)

    def same_pages(self, other: "_Pages") -> bool:
        """Whether all sequences have the same keys and values. What lies behind their ends is no one's."""
        return all(
            torch.equal(mine, others)
            for number, (first, count) in enumerate(_SEQUENCES)
            for mine, others in zip(self._read(number, first + count), other._read(number, first + count), strict=True)
        )

    def exact(self) -> Tensor:
        """The output by definition, in float64, of what the pages hold."""
        parts, start = [], 0
        for number, (first, count) in enumerate(_SEQUENCES):
            query = self._query[start : start + count].double().transpose(0, 1)
            parts.append(self._attend_exactly(query, *self._read(number, first + count), first))
            start += count
        return torch.cat(parts)

    def _read(self, number: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [length, num_kv_heads, dim] of a sequence."""
        table = self._tables[number]
        return self._layer.keys[table].flatten(0, 1)[:length], self._layer.values[table].flatten(0, 1)[:length]

    def _attend_exactly(self, query: Tensor, keys: Tensor, values: Tensor, first: int) -> Tensor:
        """query [H, T, D] in float64 -> [T, H, Dv]"""
        spec, group = self._spec, self._spec.num_heads // self._spec.num_kv_heads
        key, value = (x.double().transpose(0, 1).repeat_interleave(group, 0) for x in (keys, values))
        scores = query @ key.mT * self._scaling
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        places = torch.arange(len(keys), device=query.device)
        distance = places[first:, None] - places
        window = len(keys) if spec.sliding_window is None else spec.sliding_window
        scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
        if self._sinks is not None:
            sinks = self._sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sinks), -1)
        output: Tensor = scores.softmax(-1)[..., : len(keys)] @ value
        return output.transpose(0, 1)


def _batch(blocks: np.ndarray, counts: list[int]) -> StepBatch:
    firsts, num_tokens = (np.array(column) for column in zip(*_SEQUENCES, strict=True))
    return StepBatch(
        step_id=0,
        token_ids=np.zeros(num_tokens.sum(), dtype=np.int64),
        first_positions=firsts,
        num_tokens=num_tokens,
        num_draws=np.zeros_like(num_tokens),
        block_ids=blocks,
        num_blocks=np.array(counts),
        block_copies=np.zeros((3, 0), dtype=np.int64),
        logits_rows=np.zeros(0, dtype=np.int64),
    )

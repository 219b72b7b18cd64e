"""Row trials of attention kernels: how many rows a kernel may be called with, found by trial on this machine.

`hf_gather_backend.py` does the same for linears. A tile of 64 queries is computed whole, and again in chunks and
beside other sequences. Two kinds of data make a difference show in nearly every value, where with ordinary numbers the
rounding to bfloat16 would hide most of them: scores that are nothing but magnified rounding errors; and equal weights
over values that cancel.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.executors.kv_cache import TILE_TOKENS, KVCache, KVSpec, LayerCache
from holdfast.worker.models.gpu_row_rules import RowRule, RowRules, cancelling_product

TRIAL_BLOCK_SIZE: Final = TILE_TOKENS

_CANDIDATES: Final = tuple(RowRule(multiple_of=rows) for rows in (4, 8, 16, 32))

_NUM_KEYS: Final = (64, 320, 576, 1088)
"""Torch walks keys in steps of 512, so a trial goes to both sides of one and two of them."""

_CHUNKS: Final = (
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

_BLOWN_UP: Final = 2.0**20
"""Scales scores that are rounding errors up until they matter."""


class Kernel(Protocol):
    """The kernel under trial: see `AttentionBackend`."""

    def begin(self, batch: StepBatch) -> None: ...

    def attend(self, layer: LayerCache, query: Tensor, scaling: float, sinks: Tensor | None) -> Tensor: ...


def choose_rule(
    spec: KVSpec, rules: RowRules, dtype: torch.dtype, kernel_under: Callable[[KVSpec, RowRule], Kernel]
) -> RowRule:
    """The rule for layers of this kind. `kernel_under` makes a kernel for blocks of `TRIAL_BLOCK_SIZE`.

    A window changes which keys are read, not how, so it plays no part.
    """
    spec = replace(spec, sliding_window=None)
    kind = "" if spec.softcap is None and not spec.has_sinks else " explicit"
    heads = f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.key_dim}/{spec.value_dim}"
    name = f"attention{kind} {heads} {str(dtype).removeprefix('torch.')}"

    def holds(rule: RowRule) -> bool:
        return rows_agree(kernel_under(spec, rule), spec, dtype, rules.device)

    return rules.choose(name, _CANDIDATES, holds)


def rows_agree(
    kernel: Kernel,
    spec: KVSpec,
    dtype: torch.dtype,
    device: torch.device,
    lengths: Sequence[int] = _NUM_KEYS,
    chunks: Sequence[tuple[int, int]] = _CHUNKS,
) -> bool:
    """Whether a query's output has the same bits in a whole tile and in chunks of it, alone and beside others.

    `lengths`: numbers of keys, multiples of 64. `chunks`: tokens of a chunk, and how many sequences run it in one step.
    """
    (layer,) = KVCache.allocate([spec], max(lengths) // TILE_TOKENS, TRIAL_BLOCK_SIZE, dtype, device).layers
    return all(
        _chunks_agree(kernel, layer, data, num_keys - TILE_TOKENS, chunks)
        for num_keys in lengths
        for data in _trial_data(spec, num_keys, dtype, device)
    )


@dataclass(frozen=True, slots=True)
class _TrialData:
    query: Tensor
    """[64, num_heads, key_dim]"""
    keys: Tensor
    """[num_keys, num_kv_heads, key_dim]"""
    values: Tensor
    """[num_keys, num_kv_heads, value_dim]"""
    scaling: float
    sinks: Tensor | None


def _trial_data(spec: KVSpec, num_keys: int, dtype: torch.dtype, device: torch.device) -> Iterator[_TrialData]:
    num_kv_heads, value_dim = spec.num_kv_heads, spec.value_dim
    query, keys = cancelling_product(num_keys * num_kv_heads, spec.key_dim, 64 * spec.num_heads, dtype, device)
    query = query.view(TILE_TOKENS, spec.num_heads, spec.key_dim)
    keys = keys.view(num_keys, num_kv_heads, spec.key_dim)
    seen_by_most = num_keys - TILE_TOKENS // 2
    _, cancelling = cancelling_product(num_kv_heads * value_dim, seen_by_most, 1, dtype, device)
    values = torch.zeros(num_keys, num_kv_heads, value_dim, dtype=dtype, device=device)
    values[:seen_by_most] = cancelling.T.reshape(seen_by_most, num_kv_heads, value_dim)
    sinks = torch.zeros(spec.num_heads, dtype=dtype, device=device) if spec.has_sinks else None
    yield _TrialData(query, keys, values, _BLOWN_UP, sinks)
    yield _TrialData(torch.zeros_like(query), keys, values, 1.0, sinks)


def _chunks_agree(
    kernel: Kernel, layer: LayerCache, data: _TrialData, tile_start: int, chunks: Sequence[tuple[int, int]]
) -> bool:
    num_keys = len(data.keys)
    layer.keys.flatten(0, 1)[:num_keys] = data.keys
    layer.values.flatten(0, 1)[:num_keys] = data.values

    def attend(first: int, count: int, company: int) -> Tensor:
        kernel.begin(_batch(tile_start + first, count, company))
        query = data.query[first : first + count].repeat(company, 1, 1)
        return kernel.attend(layer, query, data.scaling, data.sinks)

    whole = attend(0, TILE_TOKENS, 1)
    for count, company in chunks:
        first = (TILE_TOKENS - count) // 2
        if not torch.equal(attend(first, count, company), whole[first : first + count].repeat(company, 1, 1)):
            return False
    return True


def _batch(first_position: int, num_tokens: int, num_sequences: int) -> StepBatch:
    """Sequences that all run the same tokens and read the same blocks: 0, 1, 2, ..."""
    table = np.arange((first_position + num_tokens - 1) // TRIAL_BLOCK_SIZE + 1)

    def each(value: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.full(num_sequences, value, dtype=np.int64)

    return StepBatch(
        step_id=0,
        token_ids=np.zeros(num_sequences * num_tokens, dtype=np.int64),
        first_positions=each(first_position),
        num_tokens=each(num_tokens),
        num_draws=each(0),
        block_ids=np.tile(table, num_sequences),
        num_blocks=each(len(table)),
        block_copies=np.zeros((3, 0), dtype=np.int64),
        logits_rows=np.zeros(0, dtype=np.int64),
    )

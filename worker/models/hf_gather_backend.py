"""The HF backend on a GPU by torch's kernels alone: attention that gathers and calls SDPA, and linears whose product is
called with numbers of rows under which rows do not depend on their neighbours.
"""

import logging
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.worker.distributed.step_batch import StepBatch
from holdfast.worker.executors.cpu.sampler import NativeSampler
from holdfast.worker.executors.kv_cache import KVCache
from holdfast.worker.executors.step_sampler import StepSampler
from holdfast.worker.models.gpu_attention import GpuAttention, attach, copy_blocks
from holdfast.worker.models.gpu_gather import GatherAttention
from holdfast.worker.models.gpu_row_rules import LARGEST_TRIAL, RowRule, RowRules, cancelling_product, rows_agree
from holdfast.worker.models.hf_steps import HfSteps
from holdfast.worker.models.linear import Kernel
from holdfast.worker.models.memory import kv_bytes_per_token
from holdfast.worker.models.model import RankModel
from holdfast.worker.models.parallelize import Target
from holdfast.worker.progress import ProgressCounter


def tried_product(rules: RowRules, weight: Tensor, bias: Tensor | None) -> Kernel:
    """The product with a weight [out, in], under the rule of its shape and type."""
    weight = weight.contiguous()
    rule = _choose_rule(rules, weight, bias is not None)

    def product(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    return lambda x: rule.run(product, x)


def linear_candidates() -> list[RowRule]:
    """Rules for a linear, cheapest first: any size, a floor, multiples."""
    return [RowRule(min_rows=rows) for rows in (1, 2, 4, 8, 16)] + [RowRule(multiple_of=rows) for rows in (4, 16)]


def _choose_rule(rules: RowRules, weight: Tensor, has_bias: bool) -> RowRule:
    """The rule for weights of this shape and type; their values play no part."""
    out_features, in_features = weight.shape

    def holds(rule: RowRule) -> bool:
        rows, trial_weight = cancelling_product(out_features, in_features, LARGEST_TRIAL, weight.dtype, weight.device)
        bias = torch.zeros_like(trial_weight[:, 0]) if has_bias else None
        return rows_agree(lambda x: F.linear(x, trial_weight, bias), rule, rows)

    dtype = str(weight.dtype).removeprefix("torch.")
    name = f"linear {out_features}x{in_features} {dtype}{' + bias' * has_bias}"
    return rules.choose(name, linear_candidates(), holds)


logger = logging.getLogger(__name__)


class GatherSteps:
    """Runs the steps of one rank's HF backend, whose attention modules call `attention`."""

    numerics: Final = "gather-1"

    def __init__(self, model: RankModel, cache: KVCache, attention: GpuAttention) -> None:
        self._model = model
        self._cache = cache
        self._attention = attention

    def run(self, batch: StepBatch) -> Tensor:
        """The logits [rows wanted, vocab] of one step, float32."""
        copy_blocks(self._cache, batch)
        self._attention.begin(batch)
        return self._model(batch).float()

    def warm_up(self, max_rows: int) -> None:
        """Runs one step of each power of two: libraries load and choose kernels at their first use. Overwrites the
        first block.
        """
        for power in reversed(range(max_rows.bit_length())):
            self.run(StepBatch.decoding(1 << power, 1, self._cache.block_size))
        self._cache.clear(torch.zeros(1, dtype=torch.int64))

    def close(self) -> None:
        """Nothing of it goes before the cache."""


class HfGatherBackend:
    """The kernels of one rank's HF backend on a GPU where Triton is not installed."""

    def __init__(self, model: RankModel, target: Target) -> None:
        self._model = model
        self._target = target
        self._rules = RowRules(target.device)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Kernel:
        """torch's product, under a rule that is tried out."""
        return tried_product(self._rules, weight, bias)

    @property
    def row_invariant(self) -> bool:
        return self._rules.report.row_invariant

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self._model.specs, self._target.dtype)

    def make_sampler(self) -> StepSampler:
        """On the CPU. Only the leader draws, so the others' has no threads of use."""
        return NativeSampler.with_threads(torch.get_num_threads() if self._target.group.rank == 0 else 1)

    def warm_up_sampler(self, max_rows: int) -> None:
        """Nothing is compiled at its first use."""

    def allocate(self, num_blocks: int, block_size: int, progress: ProgressCounter) -> tuple[KVCache, HfSteps]:
        target = self._target
        cache = KVCache.allocate(self._model.specs, num_blocks, block_size, target.dtype, target.device)
        with torch.inference_mode():  # trials run; the cache itself is written outside of it too
            return cache, self._make_steps(cache, progress)

    def _make_steps(self, cache: KVCache, progress: ProgressCounter) -> HfSteps:
        attention = GatherAttention(cache, self._rules)
        attach(self._model, cache, attention, progress)
        return GatherSteps(self._model, cache, attention)

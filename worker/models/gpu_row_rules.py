"""Row rules on a GPU: with how many rows torch's kernels are called, so that no row's bits depend on the others.

torch's kernels pick their order of summing by the number of rows, so a token computed alone and the same token in a
batch may differ in the last bit, and then the text differs. Which numbers of rows agree is a property of the kernel,
the shape and the machine, so it is tried and not assumed: `RowRules` walks a list of rules, cheapest first, and takes
the first one under which rows come out equal bit for bit at many sizes, places and among other rows. The list is fixed
and nothing is timed: equal machines decide equally, so a request may move between them.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

_log = logging.getLogger(__name__)

Kernel = Callable[[Tensor], Tensor]
"""Rows [M, in] to rows [M, out]."""

TRIED_COUNTS: Final = (
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    12,
    15,
    16,
    17,
    31,
    32,
    33,
    48,
    64,
    100,
    128,
    200,
    256,
    511,
    1024,
    2048,
)
"""Numbers of rows that a trial calls a kernel with, as far as it goes."""

LARGEST_TRIAL: Final = TRIED_COUNTS[-1]
"""Rows that a trial of a linear goes up to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRule:
    """How to call a kernel: rows are padded up to a number that is allowed."""

    min_rows: int = 1
    multiple_of: int = 1

    def padded(self, num_rows: int) -> int:
        """The smallest allowed number that holds `num_rows` rows."""
        return max(self.min_rows, -(-num_rows // self.multiple_of) * self.multiple_of)

    def run(self, kernel: Kernel, x: Tensor) -> Tensor:
        """`kernel` over the rows of `x` [..., in], called with an allowed number of them."""
        num_rows = x.numel() // x.shape[-1]
        missing = self.padded(num_rows) - num_rows
        if not missing:
            return kernel(x)
        y = kernel(F.pad(x.reshape(num_rows, -1), (0, 0, 0, missing)))[:num_rows]
        return y.view(*x.shape[:-1], y.shape[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class InvarianceReport:
    """What the trials found on this machine."""

    rules: dict[str, RowRule]
    """The rule of every kind of call, by a name such as `linear 512x256 bfloat16`."""
    failures: tuple[str, ...]
    """Kinds of call for which no rule keeps rows independent."""

    @property
    def row_invariant(self) -> bool:
        return not self.failures


class RowRules:
    """The rules found so far, one for each kind of call. A rank owns one and passes it to all its kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rules: dict[str, RowRule] = {}
        self._failures: list[str] = []

    @property
    def report(self) -> InvarianceReport:
        return InvarianceReport(rules=dict(self._rules), failures=tuple(self._failures))

    def choose(self, name: str, candidates: Sequence[RowRule], holds: Callable[[RowRule], bool]) -> RowRule:
        """The first of `candidates` that `holds`. When none does, that is noted as a failure, and it is the first one.

        `name` says all that the outcome depends on besides the machine.
        """
        if name not in self._rules:
            self._rules[name] = self._first_that_holds(name, candidates, holds)
        return self._rules[name]

    def _first_that_holds(self, name: str, candidates: Sequence[RowRule], holds: Callable[[RowRule], bool]) -> RowRule:
        for rule in candidates:
            if holds(rule):
                return rule
        _log.warning("%s: rows depend on their neighbours at every size tried on this machine", name)
        self._failures.append(name)
        return candidates[0]


def fix_gpu_kernels() -> None:
    """Tells cuBLAS not to split sums by the number of rows, and to take float32 at its word.

    A rank on a GPU calls this once, before anything else uses CUDA.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (False, False)  # neither in half precision, nor split along K
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    matmul.fp32_precision = "ieee"
    torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan of tens of ms for each new number of rows and keys


def rows_agree(kernel: Kernel, rule: RowRule, rows: Tensor) -> bool:
    """Whether each of `rows` [M, in] gets the same bits at every tried size up to M, at several places in the call."""
    together = rule.run(kernel, rows)
    for count in (count for count in TRIED_COUNTS if count <= len(rows)):
        for start in {0, (len(rows) - count) // 2} if count > 2 else range(0, len(rows), len(rows) // 4):
            part = slice(start, start + count)
            if not torch.equal(rule.run(kernel, rows[part]), together[part]):
                return False
    return True


def cancelling_product(
    out_features: int, in_features: int, num_rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rows [num_rows, in] and a weight [out, in] whose product is zero but for rounding errors.

    Each term comes twice, with both signs, in a random order. So another order of summing shows in nearly every value,
    where with ordinary numbers the rounding to bfloat16 would hide all but one in some thousands.
    """
    generator = torch.Generator().manual_seed(in_features)
    order = torch.randperm(in_features, generator=generator)
    half = in_features // 2
    odd = in_features % 2
    x = torch.randn(num_rows, half, generator=generator)
    w = torch.randn(min(out_features, 256), half, generator=generator)
    rows = torch.cat((x, x, torch.zeros(num_rows, odd)), 1)[:, order]
    weight = torch.cat((w, -w, torch.zeros(len(w), odd)), 1)[:, order].to(device, dtype)
    return rows.to(device, dtype), weight.repeat(-(-out_features // len(weight)), 1)[:out_features]

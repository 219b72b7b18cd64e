"""Row tiling for batch invariance: how many rows a matmul is called with, so that no row's bits depend on the others.

Matrix kernels pick their order of summing by the number of rows, so a token computed alone and the same token in a
batch may differ in the last bit, and then the text differs. Which numbers of rows agree is a property of the kernel,
the shape and the machine, so it is tried and not assumed: `RowTiles` walks a list of rules, cheapest first, and takes
the first one under which rows come out equal bit for bit at many sizes, places and among other rows.

The list is fixed and nothing is timed: equal machines decide equally, so a request may move between them. What may not
live here: the kernels themselves (`linear.py`, `worker/models/`).
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

ANY: Final = 2**31
"""As `max_rows`: calls of any size."""

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
    """How to call a kernel: rows are cut into tiles of `max_rows`, and a tile is padded up to a size allowed."""

    min_rows: int = 1
    multiple_of: int = 1
    max_rows: int = ANY

    def padded(self, num_rows: int) -> int:
        """The smallest allowed size that holds `num_rows` rows."""
        return max(self.min_rows, -(-num_rows // self.multiple_of) * self.multiple_of)

    def allows(self, num_rows: int) -> bool:
        """A call with `num_rows` rows needs neither padding nor cutting."""
        return self.min_rows <= num_rows <= self.max_rows and num_rows % self.multiple_of == 0

    def run(self, kernel: Kernel, x: Tensor) -> Tensor:
        """`kernel` over the rows of `x` [..., in], called with allowed sizes only."""
        rows = x.reshape(-1, x.shape[-1])
        tiles = [self._run_tile(kernel, tile) for tile in torch.split(rows, self.max_rows)]
        y = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _run_tile(self, kernel: Kernel, tile: Tensor) -> Tensor:
        num_rows = tile.shape[0]
        missing = self.padded(num_rows) - num_rows
        return kernel(F.pad(tile, (0, 0, 0, missing)))[:num_rows] if missing else kernel(tile)


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


class RowTiles:
    """The rules found so far, one for each kind of call. A rank owns one and passes it to all its kernels."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._rules: dict[str, RowRule] = {}
        self._failures: list[str] = []

    @property
    def report(self) -> InvarianceReport:
        return InvarianceReport(rules=dict(self._rules), failures=tuple(self._failures))

    def choose(self, name: str, candidates: Sequence[RowRule], holds: Callable[[RowRule], bool]) -> RowRule:
        """The first of `candidates` that `holds`. When none does, that is noted as a failure, and it is the last one;
        on a GPU the first.

        `name` says all that the outcome depends on besides the machine and its number of threads.
        """
        key = f"{name}, {torch.get_num_threads()} threads" if self.device.type == "cpu" else name
        if key not in self._rules:
            self._rules[key] = self._first_that_holds(key, candidates, holds)
        return self._rules[key]

    def _first_that_holds(self, key: str, candidates: Sequence[RowRule], holds: Callable[[RowRule], bool]) -> RowRule:
        """On a GPU, rows are padded but never cut into tiles: many small calls would cost more than they keep."""
        is_gpu = self.device.type != "cpu"
        tried = [rule for rule in candidates if rule.max_rows == ANY] if is_gpu else candidates
        for rule in tried:
            if holds(rule):
                return rule
        _log.warning("%s: rows depend on their neighbours at every size tried on this machine", key)
        self._failures.append(key)
        return candidates[0] if is_gpu else candidates[-1]


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


def linear_candidates() -> list[RowRule]:
    """Rules for a linear on a GPU, cheapest first: any size, a floor, multiples."""
    return [RowRule(min_rows=rows) for rows in (1, 2, 4, 8, 16)] + [RowRule(multiple_of=rows) for rows in (4, 16)]


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

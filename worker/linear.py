"""Linear layers over this rank's slice of a weight: row-invariant, packed where that pays, split over the ranks.

A weight is kept once, packed or plain, never both. How many rows a kernel is called with is decided in
`row_tiles.py`; which slice of a checkpoint belongs to a rank is decided by whoever builds these layers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.row_tiles import Kernel, RowRule, RowTiles, largest_trial, linear_candidates, rows_agree
from worker.tensor_parallel import TensorParallelGroup

PACKED_FOR_ROWS = 32
"""The layout of a packed weight is chosen for calls of about this many rows."""


class Linear(nn.Module):
    """y = x W^T + b for x [..., in_features], with the same bits for a row in any company.

    `weight` is [out_features, in_features]. The layer keeps it, or a packed copy instead, as no parameter or buffer:
    drop other references, and do not move or cast the layer.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, tiles: RowTiles) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        kernels = _Kernels(weight.detach(), None if bias is None else bias.detach())
        self._rule = kernels.choose_rule(tiles)
        self._kernel = kernels.of(self._rule)

    def forward(self, x: Tensor) -> Tensor:
        if self._rule.allows(x.numel() // self.in_features):
            return self._kernel(x)
        return self._rule.run(self._kernel, x)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self._rule}"


class ColumnParallelLinear(nn.Module):
    """This rank's share of the outputs: weight [out / size, in], bias [out / size]; x has all inputs.

    With `gather_output` every rank gets all outputs, in rank order.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        group: TensorParallelGroup,
        *,
        tiles: RowTiles,
        gather_output: bool = False,
    ) -> None:
        super().__init__()
        self.linear = Linear(weight, bias, tiles=tiles)
        self._group = group
        self._gathers = gather_output and group.size > 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return self._group.all_gather(y) if self._gathers else y


class RowParallelLinear(nn.Module):
    """This rank's share of the inputs: weight [out, in / size]; the ranks' results are summed.

    `bias` [out] is whole on every rank and added once, after the sum. With `split_input` x has all inputs and this
    rank takes its share, else x is that share.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        group: TensorParallelGroup,
        *,
        tiles: RowTiles,
        split_input: bool = False,
    ) -> None:
        super().__init__()
        whole = group.size == 1
        self.linear = Linear(weight, bias if whole else None, tiles=tiles)
        self._bias = None if bias is None or whole else bias.detach()
        self._group = group
        self._splits = split_input and not whole
        self._first_input = group.rank * self.linear.in_features

    def forward(self, x: Tensor) -> Tensor:
        if self._splits:
            x = x.narrow(-1, self._first_input, self.linear.in_features)
        y = self._group.all_reduce(self.linear(x))
        return y if self._bias is None else y + self._bias


class _Kernels:
    """The ways to multiply by one weight, made on demand, while a rule is chosen."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self._packed: Tensor | None = None

    def of(self, rule: RowRule) -> Kernel:
        """The kernel that `rule` asks for. It holds one form of the weight."""
        if not rule.packed:
            weight, bias = self._weight, self._bias
            return lambda x: F.linear(x, weight, bias)
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight.contiguous(), PACKED_FOR_ROWS)
        linear, packed, bias = torch.ops.mkldnn._linear_pointwise.default, self._packed, self._bias
        return lambda x: linear(x, packed, bias, "none", [], "")

    def choose_rule(self, tiles: RowTiles) -> RowRule:
        weight = self._weight
        candidates = linear_candidates(weight.device, packable=_is_packable(weight), num_weights=weight.numel())
        out_features, in_features = weight.shape
        name = f"linear {out_features}x{in_features} {str(weight.dtype)[6:]}{'' if self._bias is None else ' + bias'}"
        return tiles.choose(name, candidates, self._agrees)

    def _agrees(self, rule: RowRule) -> bool:
        weight = self._weight
        num_rows = largest_trial(weight.device, weight.numel())
        generator = torch.Generator().manual_seed(weight.shape[1])
        rows = torch.randn(num_rows, weight.shape[1], generator=generator)
        return rows_agree(self.of(rule), rule, rows.to(weight.device, weight.dtype))


def _is_packable(weight: Tensor) -> bool:
    """oneDNN can pack and multiply this weight on this machine."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or not has_onednn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32

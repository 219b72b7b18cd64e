"""Products, experts and functions of Hugging Face's modules on a device: the executor's kernels behind calls on torch
tensors. A row has the same bits in any company: one order of adding for any number of rows (`kernels/layers.py`).

Modules take means of rows in their norms, and multiply by weights that are no linear's in their routers. torch's
kernels for these choose how a row is shared by threads, or cut, by the number of rows. Its functions that give a row to
one block of threads of a fixed size (layer_norm, softmax, topk) stay, and so does what adds nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from holdfast.worker.executors.gpu.kernels.layers import sum_rows
from holdfast.worker.executors.gpu.launches import Launch, Launches
from holdfast.worker.executors.gpu.mixtures import MixtureLaunches, RowGroups, grouped_tile, most_tiles
from holdfast.worker.executors.linears import Linear

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


class DeviceProduct:
    """y = x W^T + b for rows x [..., in], in the weight's dtype: sums in float32, rounded once."""

    def __init__(
        self, launches: Launches, weight: Tensor, bias: Tensor | None, num_slices: int = 1, *, is_part: bool = False
    ) -> None:
        """`weight` [out, in], `bias` [out], of one of `DTYPES`. A contiguous weight is kept as it is. Inputs are summed
        in `num_slices`, added as a binary tree. Results are float32 where they are a part of a sum over ranks.
        """
        assert weight.dtype in DTYPES, weight.dtype
        self._launches = launches
        self._num_slices = num_slices if num_slices in (2, 4, 8) else 1  # powers of two are what kernels add
        self._out_dtype = torch.float32 if is_part else weight.dtype
        self._linear = Linear(weights=(weight.contiguous(),), bias=None if bias is None else bias.float().contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        (weight,) = self._linear.weights
        rows = x.reshape(-1, weight.shape[1]).to(weight.dtype).contiguous()
        out = self._sliced(rows) if self._num_slices > 1 else self._whole(rows)
        return out.view(*x.shape[:-1], len(weight))

    def _whole(self, rows: Tensor) -> Tensor:
        out = rows.new_empty((1, len(rows), len(self._linear.weights[0])), dtype=self._out_dtype)
        self._launches.linear(rows, self._linear, out)
        return out

    def _sliced(self, rows: Tensor) -> Tensor:
        shape = (self._num_slices, len(rows), len(self._linear.weights[0]))
        parts = rows.new_empty(shape, dtype=torch.float32)
        self._launches.linear(rows, self._linear, parts)
        total = torch.empty_like(parts[0])
        self._launches.sum_parts(parts, total)
        return (total if self._linear.bias is None else total + self._linear.bias).to(self._out_dtype)


class DeviceExperts:
    """The experts of one mixture, on rows that have chosen some of them."""

    def __init__(
        self,
        launch: Launch,
        up: Tensor,
        up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        activate: Callable[[Tensor], Tensor],
    ) -> None:
        """up [experts, inner or twice that, hidden], down [experts, hidden, inner], and biases without the last
        dimension. `activate` takes what `up` gives [rows, ...] to [rows, inner], each row by itself.
        """
        self._launches = MixtureLaunches(launch)
        self._up, self._down = up.contiguous(), down.contiguous()
        self._up_bias, self._down_bias = (
            None if bias is None else bias.float().contiguous() for bias in (up_bias, down_bias)
        )
        self._activate = activate

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], chosen [T, top_k], int64, and what each counts -> [T, hidden]. A row's experts are added in
        the order of their ids, in float32, and rounded once.
        """
        x = x.contiguous()
        chosen, order = chosen.sort(-1)
        chosen, weights = chosen.to(torch.int32), weights.gather(-1, order).float()
        num_chosen, top_k = chosen.numel(), chosen.shape[1]
        groups = self._groups(chosen, x.dtype)
        up = x.new_empty(1, num_chosen, self._up.shape[1])
        self._launches.grouped(x, self._up, groups, up, sharers=top_k, bias=self._up_bias)
        inner = self._activate(up[0]).contiguous()
        sums = x.new_empty((1, num_chosen, x.shape[1]), dtype=torch.float32)
        self._launches.grouped(inner, self._down, groups, sums, sharers=1)
        out = x.new_empty(x.shape, dtype=torch.float32)
        self._launches.add(sums, chosen, weights, out, bias=self._down_bias, shared=None, gates=None)
        return out.to(x.dtype)

    def _groups(self, chosen: Tensor, dtype: torch.dtype) -> RowGroups:
        count = len(self._up)
        tile = grouped_tile(chosen.numel(), count, dtype)
        num_tiles = most_tiles(chosen.numel(), count, tile.tokens)
        groups = RowGroups(tile, chosen.new_empty(num_tiles), chosen.new_empty(num_tiles, tile.tokens))
        self._launches.group(chosen, count, groups)
        return groups


_Function = Callable[..., Any]


class RowFunctions(TorchFunctionMode):
    """Inside it, on this thread, they are ours for floating-point tensors of the device."""

    def __init__(self, launch: Launch, device: torch.device) -> None:
        super().__init__()
        self._launch = launch
        self._launches = Launches(launch)
        self._device_type = device.type
        self._ours: Final[Mapping[_Function, _Function]] = {
            F.linear: self._linear,
            torch.mean: self._mean,
            Tensor.mean: self._mean,
            torch.sum: self._sum,
            Tensor.sum: self._sum,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        ours = self._ours.get(func)
        result = None if ours is None else ours(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        if not self._has(x) or x.dtype != weight.dtype:
            return None
        return DeviceProduct(self._launches, weight, bias)(x)

    def _mean(self, input: Tensor, dim: Any = None, keepdim: bool = False, **others: Any) -> Tensor | None:
        return self._reduced(input, dim, keepdim, input.shape[-1] if input.dim() else 1, others)

    def _sum(self, input: Tensor, dim: Any = None, keepdim: bool = False, **others: Any) -> Tensor | None:
        return self._reduced(input, dim, keepdim, 1, others)

    def _reduced(self, x: Tensor, dim: Any, keepdim: bool, divisor: int, others: object) -> Tensor | None:
        """Sums over the last dimension, divided; None: it is not asked for just that."""
        (dim,) = dim if isinstance(dim, tuple | list) and len(dim) == 1 else (dim,)
        if others or not isinstance(dim, int) or dim not in (-1, x.dim() - 1) or not self._has(x) or not x.numel():
            return None
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = rows.new_empty(len(rows))
        length = rows.shape[1]
        block = 1 << max(0, length - 1).bit_length()
        arguments = {"x": rows, "out": out, "length": length, "divisor": float(divisor), "BLOCK": block}
        self._launch(sum_rows, (len(rows),), arguments, num_warps=min(16, max(1, block // 512)), num_stages=1)
        return out.view(*x.shape[:-1], 1) if keepdim else out.view(x.shape[:-1])

    def _has(self, x: object) -> bool:
        return isinstance(x, Tensor) and x.device.type == self._device_type and x.dtype in DTYPES

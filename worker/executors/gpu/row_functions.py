"""Functions of torch that add within rows, by kernels with one order of adding for any number of rows.

Hugging Face's modules take means of rows in their norms, and multiply by weights that are no linear's in their routers.
torch's kernels for these choose how a row is shared by threads, or cut, by the number of rows. Its functions that give
a row to one block of threads of a fixed size (layer_norm, softmax, topk) stay, and so does what adds nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from holdfast.worker.executors.gpu.kernels.layers import sum_rows
from holdfast.worker.executors.gpu.launches import Launch, Launches
from holdfast.worker.executors.gpu.products import DTYPES, DeviceProduct

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

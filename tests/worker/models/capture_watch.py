"""What of a step cannot be in a CUDA graph, found without a GPU: operation by operation, on any kind of tensor."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
"""Their sizes depend on values only where they are given a mask."""


class _RefusedError(Exception):
    """An operation that a graph cannot hold."""


class _Watch(TorchDispatchMode):
    """Refuses operations that a graph cannot hold, before they run."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        inputs = tree_leaves((args, kwargs))
        if torch.Tag.data_dependent_output in func.tags:
            raise _RefusedError(f"a value is read on the host ({func})")
        if torch.Tag.dynamic_output_shape in func.tags and not _is_plain_indexing(func, inputs):
            raise _RefusedError(f"a size depends on values ({func})")
        result = func(*args, **kwargs)
        devices = {leaf.device.type for leaf in (*inputs, *tree_leaves(result)) if _is_array(leaf)}
        if len(devices) > 1:
            raise _RefusedError(f"values go between {' and '.join(sorted(devices))} ({func})")
        return result


def _is_plain_indexing(func: Any, inputs: list[Any]) -> bool:
    is_masked = any(isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in inputs[1:])
    return func.overloadpacket.__name__ in _INDEXING and not is_masked


def _is_array(leaf: object) -> bool:
    """Numbers that kernels are given as arguments are tensors of no dimension in main memory."""
    return isinstance(leaf, Tensor) and (leaf.dim() > 0 or leaf.device.type != "cpu")


def reason_against_capture(step: Callable[[], object]) -> str | None:
    """Why a step may not be captured; None: nothing speaks against it."""
    try:
        with torch.inference_mode(False), torch.no_grad(), _Watch():
            step()
    except _RefusedError as error:
        return str(error)
    return None

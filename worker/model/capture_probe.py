"""Probe of a model's own code: whether a step of it may be captured as a CUDA graph.

A graph repeats the kernels of one step. Code that reads a value on the host, makes tensors of sizes that depend on
values, or copies between the host and the device would be repeated wrongly, or not be captured at all. One step is
watched, operation by operation. It is a real one: Hugging Face's code takes other ways where tensors are fake. What may
not live here: capturing (`device_steps.py`).
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.worker.model.checks import first_line

_INDEXING: Final = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
"""Their sizes depend on values only where they are given a mask."""


class _RefusedError(Exception):
    """An operation that a graph cannot hold."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
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


def reason_against_capture(
    step: Callable[[Tensor, Tensor, Tensor], object], num_rows: int, device: torch.device
) -> str | None:
    """Why a step of `num_rows` sequences with one token each may not be captured; None: nothing speaks against it.

    `step` is called once with token ids, positions and rows wanted, int64 [num_rows] on `device`.
    """
    token_ids, positions, rows = (torch.zeros(num_rows, dtype=torch.int64, device=device) for _ in range(3))
    try:
        with torch.inference_mode(False), torch.no_grad(), _Watch():  # type: ignore[no-untyped-call]
            step(token_ids, positions, rows)
    except _RefusedError as error:
        return str(error)
    except (RuntimeError, NotImplementedError) as error:
        return f"its code does not run ({first_line(error)})"
    return None

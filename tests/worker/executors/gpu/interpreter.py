"""Triton's interpreter as a model of a device: bfloat16 rounds to nearest, products are added 16 inputs at a time.

The interpreter's own `dot` is numpy's, whose order of adding depends on the shape; this one adds exactly what one
matrix instruction takes (16 inputs), rounds, and goes on, so bits show in which order a kernel goes. A fused
multiply-add rounds once.
"""

import inspect
import os
import threading
from typing import Any

import numpy as np
import pytest

triton = pytest.importorskip("triton")
assert os.environ.get("TRITON_INTERPRET") == "1", "tests/conftest.py sets it, before anything loads Triton"

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from holdfast.worker.executors.gpu.launches import triton_launch  # noqa: E402

_INSTRUCTION_INPUTS = 16
_plain_convert = interpreter._convert_float


def _floats(data: np.ndarray, dtype: Any) -> np.ndarray:
    if dtype == tl.bfloat16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data


def _rounded(data: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 as uint16, to nearest, ties to even."""
    bits = data.astype(np.float32).view(np.uint32)
    bias = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + bias) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)


def _convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    if (source, target) == (tl.bfloat16, tl.float32):
        return _floats(data, source)
    if (source, target) == (tl.float32, tl.bfloat16):
        return _rounded(data)
    return _plain_convert(data, source, target, rounding)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    left, right = _floats(a.data, a.dtype).astype(np.float64), _floats(b.data, b.dtype).astype(np.float64)
    total = d.data.astype(np.float32)
    for first in range(0, left.shape[1], _INSTRUCTION_INPUTS):
        some = slice(first, first + _INSTRUCTION_INPUTS)
        total = (total + left[:, some] @ right[some]).astype(np.float32)
    return interpreter.TensorHandle(total, d.dtype.scalar)


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z of float32, rounded once: by way of float64 that is rounded to odd. Older interpreters round twice."""
    product = np.multiply(x.data, y.data, dtype=np.float64)
    added = z.data.astype(np.float64)
    total = np.asarray(product + added)
    back = total - product
    error = (product - (total - back)) + (added - back)
    is_even = (total.view(np.int64) & 1) == 0
    odd = np.where((error != 0) & is_even, np.nextafter(total, np.copysign(np.inf, error)), total)
    return interpreter.TensorHandle(odd.astype(np.float32), z.dtype.scalar)


def _splat(self: Any, shape: Any, scalar: Any) -> Any:
    """Truth stays truth: the interpreter takes a comparison's result for a number of what was compared."""
    spread = _plain_splat(self, shape, scalar)
    if scalar.data.dtype == np.bool_:
        return interpreter.TensorHandle(spread.data.astype(np.bool_), tl.int1)
    return spread


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _plain_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # numpy 2.4 takes no arrays


_builtins: dict[Any, list[str]] = {}
_patched: set[int] = set()
"""Modules of the functions that the kernel which is running has called."""


def _patch_builtin(module: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's, which looks through the whole module each time: longer than most kernels take."""
    if module not in _builtins:
        _builtins[module] = [name for name, one in inspect.getmembers(module) if tl.core.is_builtin(one)]
    for name in _builtins[module]:
        if tl.core.is_builtin(one := getattr(module, name)):
            interpreter._patch_attr(module, name, one, builder, scope)


def _run_grid(self: Any, *args: Any, **kwargs: Any) -> None:
    _patched.clear()
    _plain_run_grid(self, *args, **kwargs)


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """As the interpreter's, which patches the language anew at each call."""
    names = id(self.fn.__globals__)
    if names not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(names)
    return self.rewrite()(*args, **kwargs)


_plain_run_grid = interpreter.GridExecutor.__call__
interpreter.GridExecutor.__call__ = _run_grid
interpreter.InterpretedFunction.__call__ = _call_device_function
interpreter._patch_builtin = _patch_builtin
_plain_patch = interpreter._patch_lang_tensor
_plain_splat = interpreter.InterpreterBuilder.create_splat
interpreter._patch_lang_tensor = _patch_tensor
interpreter._convert_float = _convert
interpreter.InterpreterBuilder.create_dot = _dot
interpreter.InterpreterBuilder.create_splat = _splat
interpreter.InterpreterBuilder.create_fma = _fma


def _rounding_once(plain: Any) -> Any:
    """An operation of two bfloat16 tensors, which the interpreter takes for whole numbers: rounded once."""

    def run(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16:
            return plain(self, lhs, rhs)
        wide = [interpreter.TensorHandle(_floats(one.data, tl.bfloat16), tl.float32) for one in (lhs, rhs)]
        return interpreter.TensorHandle(_rounded(plain(self, *wide).data), tl.bfloat16)

    return run


for _name in ("create_fadd", "create_fsub", "create_fmul"):
    setattr(interpreter.InterpreterBuilder, _name, _rounding_once(getattr(interpreter.InterpreterBuilder, _name)))

_LOCK = threading.Lock()


def launch(kernel: Any, grid: tuple[int, ...], arguments: Any, *, num_warps: int, num_stages: int) -> None:
    """One launch at a time: the interpreter keeps the place in the grid for the whole process."""
    with _LOCK, np.errstate(all="ignore"):
        triton_launch(kernel, grid, arguments, num_warps=num_warps, num_stages=num_stages)

"""The native executor's libraries, functions and products, as tests call them: by instruction class."""

from collections.abc import Sequence
from contextlib import suppress
from ctypes import CDLL, byref

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.worker.errors import ReplicaError
from holdfast.worker.executors.cpu import part_packing
from holdfast.worker.executors.cpu.build import CLASSES, IN_SOFTWARE
from holdfast.worker.executors.cpu.library import Unavailable, load_library, missing_instructions
from holdfast.worker.executors.cpu.packed_rows import IntArray
from holdfast.worker.executors.cpu.packing import PackedModel
from holdfast.worker.executors.cpu.part_packing import GROUP, TILE
from holdfast.worker.executors.cpu.tile_memory import Arena, Compactor
from holdfast.worker.executors.cpu.weight_codes import DTYPES
from holdfast.worker.executors.linears import Linear
from holdfast.worker.executors.stored_matrix import StoredMatrix

ALL = (*CLASSES, *IN_SOFTWARE)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FUNCTIONS = ("exp2", "exp", "sigmoid", "tanh", "erf", "silu", "gelu", "gelu_tanh", "sin", "cos")


def library_or_skip(name: str | None = None) -> CDLL:
    """The library of a class; what this machine lacks is said where a test is left out for it."""
    try:
        return load_library(name)
    except Unavailable as error:
        pytest.skip(str(error))


def other_classes(dtype: torch.dtype = BF16, classes: Sequence[str] = ALL) -> list[str]:
    """The classes beside AVX2 that this machine runs, for a dtype. `test_build.py` names those that it lacks."""
    wanted = [name for name in classes if name != "avx2" and (dtype == BF16 or name in CLASSES)]
    return [name for name in wanted if not missing_instructions(name)]


def function(library: CDLL, name: str, x: Tensor) -> Tensor:
    """An elementary function of x [n]."""
    padded = torch.zeros(-(-len(x) // 16) * 16)
    padded[: len(x)] = x
    out = torch.empty_like(padded)
    library.native_function(FUNCTIONS.index(name), padded.data_ptr(), out.data_ptr(), len(padded))
    return out[: len(x)]


def lets_odd_weights_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, weights that are not finite are packed as others."""
    monkeypatch.setattr(part_packing, "check_finite", lambda weight: None)
    monkeypatch.setattr(part_packing, "refuse", lambda shape, dtype: None)


class Product(PackedModel):
    """One linear, packed by one thread."""

    def __init__(
        self,
        library: CDLL,
        weight: Tensor | StoredMatrix,
        slices: int = 1,
        rows: IntArray | None = None,
        *,
        compacts: bool = False,
    ) -> None:
        """Packs a weight, or one that is stored as codes, whose numbers are bfloat16."""
        linear = Linear(weights=(weight,)) if isinstance(weight, Tensor) else Linear(codes=(weight,))
        dtype = weight.dtype if isinstance(weight, Tensor) else BF16
        self._library = library
        self._kept = []
        self._arena = Arena()
        self._itemsize = dtype.itemsize
        self.dtype = DTYPES[dtype]
        self._dtype = self._number_type = dtype
        self._slice = weight.shape[1] // slices
        self._slices = slices
        self._pool = library.native_pool_create(1, -1, None)
        self._compactor = Compactor(library, self._pool) if compacts else None
        self._keeps_codes = compacts
        self._outputs = len(weight) if rows is None else len(rows)
        self.native = self._linear(linear, slices=slices, rows=rows)
        self.native.outputs = self.native.groups * GROUP

    def __call__(self, inputs: Tensor) -> Tensor:
        """Inputs [rows, in] -> [rows, out], float32."""
        rows = self._padded(inputs)
        out = torch.full((len(rows) + 1, self.native.outputs), torch.nan)
        outcome = self._library.native_multiply(
            self._pool, byref(self.native), self.dtype, rows.data_ptr(), rows.stride(0), len(rows), out.data_ptr()
        )
        if outcome:
            raise ReplicaError(f"there is no memory for a product ({outcome})")
        assert out[-1].isnan().all(), "something was written beyond the rows"
        return out[:-1, : self._outputs]

    def __del__(self) -> None:
        with suppress(AttributeError, TypeError):  # a constructor that raised; the interpreter's end
            self._library.native_pool_destroy(self._pool)

    def _padded(self, inputs: Tensor) -> Tensor:
        """Each slice filled up to whole tiles."""
        length = self.native.slice_tiles * TILE
        dtype = BF16 if self._dtype == BF16 else F32
        rows = torch.zeros(len(inputs), self._slices, length, dtype=dtype)
        rows[..., : self._slice] = inputs.to(dtype).view(len(inputs), self._slices, self._slice)
        return rows.flatten(1)


def bits(x: Tensor) -> np.ndarray:
    """Compares by bits: signs of zeros count."""
    return x.contiguous().view(torch.int16 if x.itemsize == 2 else torch.int32).numpy()


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and bool((bits(left) == bits(right)).all())

"""Layers behind a pooled state, in float64: row by row, in one order, and the numbers that they are read from."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models.safetensors_header import read_header

Row = NDArray[np.float64]


def _gelu(value: float) -> float:
    return 0.5 * value * (1.0 + math.erf(value / math.sqrt(2.0)))


_BY_NAME: Final = {"tanh": math.tanh, "gelu": _gelu}

FUNCTIONS: Final = ("none", *_BY_NAME)
"""Activations of `Dense`."""


class Dense(NamedTuple):
    """A linear: `function(weight x + bias)`."""

    weight: Row
    """[in, out]: a row for each input, so that sums are over rows, in order."""
    bias: Row | None
    function: str

    def of(self, row: Row) -> Row:
        found: Row = np.add.reduce(self.weight * row[:, None], axis=0)
        found = found if self.bias is None else found + self.bias
        return found if self.function == "none" else np.array([_BY_NAME[self.function](one) for one in found.tolist()])


class LayerNorm(NamedTuple):
    """A LayerNorm. Its sums are exact, and rounded once."""

    weight: Row
    bias: Row | None
    eps: float

    def of(self, row: Row) -> Row:
        rest = row - math.fsum(row) / len(row)
        normed: Row = rest / math.sqrt(math.fsum(rest * rest) / len(row) + self.eps) * self.weight
        return normed if self.bias is None else normed + self.bias


PooledLayer = Dense | LayerNorm


def numbers_of(files: Iterable[Path], name: str, rows: Sequence[int] | None = None) -> Row | None:
    """A tensor of a checkpoint's safetensors files; see `numbers_in`."""
    for file in files:
        if file.suffix == ".safetensors" and (found := numbers_in(file, name, rows)) is not None:
            return found
    return None


def numbers_in(path: Path, name: str, rows: Sequence[int] | None = None) -> Row | None:
    """A matrix or vector of a safetensors file, or some rows of it; None: it has none of the name.

    Raises `ConfigurationError` for numbers of a type that is not read.
    """
    header, start = read_header(path)
    entry = header.get(name)
    if entry is None:
        return None
    stored = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}.get(entry["dtype"])
    if stored is None:
        raise ConfigurationError(f"{path}: {name} is of type {entry['dtype']}; must be F32, F16 or BF16")
    values = np.memmap(path, stored, "r", start + entry["data_offsets"][0], tuple(entry["shape"]))
    taken = np.array(values if rows is None else values[list(rows)])
    if stored == "<u2":
        return (taken.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return taken.astype(np.float64)

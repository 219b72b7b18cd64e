"""Memory of weights that stay codes on GPUs, by the files' headers and config.json. Needs no torch."""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from holdfast.worker.config import Quantization
from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.models.gguf.folder import is_made_of_gguf, read_index
from holdfast.worker.models.quantization.rule import HEADS, is_head, is_table, scheme_for
from holdfast.worker.models.quantization.scheme import Layout, WeightScheme, read_scheme
from holdfast.worker.models.safetensors_header import read_header
from holdfast.worker.models.text_model import served_config
from holdfast.worker.models.weight_files import read_object, weight_files

_GGUF_BITS: Final = {
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q5_0": 8.5,
    "Q5_1": 9.0,
    "Q8_0": 8.5,
    "Q4_K": 6.0,
    "Q5_K": 10.0,
    "Q6_K": 10.0,
}
"""Bits of a weight, scales and minima included; five and six bits take eight."""

_DEQUANTIZED: Final = (".experts.", "query_key_value")
"""Experts, and fused linears whose outputs are put in order."""

_HALF, _FLOAT, _ZERO_POINT = 16, 32, 8
_CODES: Final = ("weight_packed", "qweight", "weight")
_CODE_DTYPES: Final = ("I32", "I8", "F8_E4M3", "F8_E5M2")


class CodedBytes:
    """Bytes of codes of one checkpoint, or of one that is quantized at load."""

    def __init__(self, folder: Path, quantization: Quantization | None) -> None:
        """Without the checkpoint's files, nothing stays codes."""
        self._bits: dict[str, float] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        if is_made_of_gguf(folder):
            self._read_gguf(folder)
        elif quantization is not None:
            self._read_plain(folder, quantization)
        else:
            self._read_quantized(folder)

    def bits(self, name: str) -> float | None:
        """Bits of a weight of this parameter, scales and zero points included; None: it is dequantized."""
        return self._bits.get(name)

    def saved(self, itemsize: int) -> int:
        """Bytes less than those of numbers of this size, of the whole model."""
        return int(sum(math.prod(self._shapes[name]) * (itemsize - bits / 8) for name, bits in self._bits.items()))

    def _note(self, name: str, shape: tuple[int, ...], bits: float) -> None:
        if not any(part in name for part in _DEQUANTIZED):
            self._bits[name], self._shapes[name] = bits, shape

    def _read_gguf(self, folder: Path) -> None:
        for tensor in read_index(folder):
            if (bits := _GGUF_BITS.get(tensor.kind)) and len(tensor.shape) == 2 and not is_table(tensor.name):
                self._note(tensor.name, tuple(tensor.shape), bits)

    def _read_plain(self, folder: Path, quantization: Quantization) -> None:
        shapes = {name: tuple(entry["shape"]) for name, entry in _entries(folder)}
        table = next((shape for name, shape in shapes.items() if is_table(name)), None)
        if table is not None and not any(map(is_head, shapes)):
            shapes[HEADS[0]] = table
        for name, shape in shapes.items():
            if (scheme := scheme_for(quantization, name, shape)) is not None:
                self._note(name, shape, _bits_of(scheme, shape, _HALF))

    def _read_quantized(self, folder: Path) -> None:
        try:
            scheme = read_scheme(served_config(read_object(folder / "config.json"), folder))
        except UnsupportedModelError:
            scheme = None
        if scheme is None:
            return
        entries = dict(_entries(folder))
        for name, entry in entries.items():
            module, _, part = name.rpartition(".")
            own = scheme.of(module)
            if own is None or part not in _CODES or entry["dtype"] not in _CODE_DTYPES or is_table(f"{module}.weight"):
                continue
            shape = _shape_of(own, tuple(entry["shape"]))
            self._note(f"{module}.weight", shape, _bits_of(own, shape, _scale_bits(entries, module)))


def _entries(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names of tensors, and what the headers say of them; none of files that cannot be read."""
    for path in weight_files(folder):
        try:
            yield from read_header(path)[0].items()
        except (OSError, ValueError, RecursionError, struct.error):
            continue


def _shape_of(scheme: WeightScheme, stored: tuple[int, ...]) -> tuple[int, ...]:
    """[out, in] of a weight whose codes lie so."""
    per_word, (rows, columns) = 32 // scheme.bits, stored
    if scheme.layout is Layout.GPTQ:
        return columns, rows * per_word
    if scheme.layout is Layout.AWQ:
        return columns * per_word, rows
    return rows, columns * (per_word if scheme.layout is Layout.PACKED else 1)


def _scale_bits(entries: Mapping[str, Mapping[str, Any]], module: str) -> int:
    names = (f"{module}.{part}" for part in ("weight_scale", "weight_scale_inv", "scales"))
    found = next((entries[name]["dtype"] for name in names if name in entries), "F32")
    return _HALF if found in ("F16", "BF16") else _FLOAT


def _bits_of(scheme: WeightScheme, shape: Sequence[int], scale_bits: int) -> float:
    """Each output has scales of its own on a device, and a zero point eight bits."""
    inputs = shape[1]
    groups = -(-inputs // (scheme.block[1] or inputs))
    has_zeros = not scheme.is_symmetric or scheme.layout in (Layout.GPTQ, Layout.AWQ)
    return scheme.bits + groups * (scale_bits + _ZERO_POINT * has_zeros) / inputs

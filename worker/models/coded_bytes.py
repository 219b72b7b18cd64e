"""Memory of weights that stay codes, by the files' headers and config.json. Needs no torch."""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from holdfast.worker.config import ModelConfig, Quantization
from holdfast.worker.errors import UnsupportedModelError
from holdfast.worker.executors.cpu.library import keeps_codes_here
from holdfast.worker.executors.layout_arithmetic import num_slices
from holdfast.worker.models.families import FAMILIES
from holdfast.worker.models.family import Family
from holdfast.worker.models.formats.gguf_block_names import values_of
from holdfast.worker.models.formats.gguf_folder import is_made_of_gguf, read_index
from holdfast.worker.models.formats.quantization_rule import HEADS, is_head, is_table, scheme_for
from holdfast.worker.models.formats.quantization_scheme import Layout, WeightScheme, read_scheme
from holdfast.worker.models.safetensors_header import read_header
from holdfast.worker.models.text_model import served_config
from holdfast.worker.models.weight_files import (
    read_object,
    served_dtype,
    served_itemsize,
    weight_bytes,
    weight_files,
)

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
"""Bits of a weight on GPUs, scales and minima included; five and six bits take eight."""

_UNIT_BITS: Final = {
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q5_0": 5.5,
    "Q5_1": 6.0,
    "Q8_0": 8.5,
    "Q4_K": 4.625,
    "Q5_K": 5.625,
    "Q6_K": 6.5625,
}
"""Bits of a weight in units, on CPUs."""

_DEQUANTIZED: Final = ".kv_b_proj"
"""Part of names of linears that are read in parts: of keys and values of latents."""
_ON_DEVICES: Final = (".experts.", "query_key_value")
"""Experts, and fused linears whose outputs are put in order, which are dequantized on GPUs."""

_DELTA_NET: Final = (
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
)
"""Linears of Gated DeltaNet that are multiplied together."""

_UNIT: Final = 32  # inputs that share a scale
_HALF, _FLOAT, _ZERO_POINT = 16, 32, 8
_CODES: Final = ("weight_packed", "qweight", "weight")
_E4M3: Final = "F8_E4M3"
_CODE_DTYPES: Final = ("I32", "I8", _E4M3, "F8_E5M2")


def coded_bytes(config: ModelConfig, folder: Path, device: str, model_type: str) -> "CodedBytes | None":
    """The memory of what stays codes; None where all weights are dequantized."""
    family = FAMILIES.get(model_type)
    is_read = config.executor != "hf" and config.load_format != "dummy"
    if not is_read or family is None or (device != "cpu" and family.conv is not None):
        return None
    if device != "cpu":
        return CodedBytes(folder, config.quantization)
    is_exact = config.quantized_activations == "auto" and served_itemsize(folder, config.dtype) > 2
    if is_exact or config.quantized_activations == "bfloat16":
        return None
    keeps_floats = served_dtype(folder, config.dtype) == "bfloat16" and keeps_codes_here()
    return CodedBytes(folder, config.quantization, family, keeps_floats=keeps_floats)


def memory_of_weights(config: ModelConfig, folder: Path, device: str) -> int:
    """Memory of the weights of all ranks together, for weights that stay in these codes."""
    whole = weight_bytes(folder, config.dtype, config.quantization)
    model_type = str(served_config(read_object(folder / "config.json"), folder).get("model_type"))
    coded = coded_bytes(config, folder, device, model_type)
    return whole if coded is None else whole - coded.saved(served_itemsize(folder, config.dtype))


class CodedBytes:
    """Bytes of codes of a checkpoint that is quantized, or will be at load."""

    def __init__(
        self,
        folder: Path,
        quantization: Quantization | None,
        in_units: Family | None = None,
        *,
        keeps_floats: bool = False,
    ) -> None:
        """`in_units`: the family of a model that is served on CPUs; else they are codes on a GPU. `keeps_floats`:
        weights of E4M3 stay codes on CPUs. Without the checkpoint's files, nothing stays codes.
        """
        self._in_units = in_units
        self._keeps_floats = keeps_floats
        self._bits: dict[str, float] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        if is_made_of_gguf(folder):
            self._read_gguf(folder)
        elif quantization is not None:
            self._read_plain(folder, quantization)
        else:
            self._read_quantized(folder)
        if in_units is not None:
            self._leave_out_unfit(served_config(read_object(folder / "config.json"), folder), in_units)

    def bits(self, name: str) -> float | None:
        """Bits of a weight of this parameter, scales and zero points included; None: it is dequantized."""
        return self._bits.get(name)

    def saved(self, itemsize: int) -> int:
        """Bytes less than those of numbers of this size, of the whole model."""
        return int(sum(math.prod(self._shapes[name]) * (itemsize - bits / 8) for name, bits in self._bits.items()))

    def _note(self, name: str, shape: tuple[int, ...], bits: float) -> None:
        is_there = self._in_units is not None or not any(part in name for part in _ON_DEVICES)
        if is_there and _DEQUANTIZED not in name:
            self._bits[name], self._shapes[name] = bits, shape

    def _leave_out_unfit(self, config: Mapping[str, Any], family: Family) -> None:
        """Weights whose slices are not whole units, and stacked weights with an unquantized part, or with several forms
        that no panel of outputs could have.
        """
        heads = int(config.get("num_attention_heads") or 1)
        stacked = [stored.removesuffix(".weight") for ours, stored in family.stored_as if ours.endswith("down_proj")]
        inputs_apart = (family.output, family.down, *(family.moe.parts[-1:] if family.moe else ()), *stacked)
        for name, shape in list(self._shapes.items()):
            module = name.removesuffix(".weight")
            slices = num_slices(shape[1], heads) if module.endswith(inputs_apart) and not is_head(name) else 1
            if shape[1] % (slices * _UNIT):
                del self._bits[name]
        for stack in (family.qkv, family.gate_up, *((family.moe.parts[:-1],) if family.moe else ()), *_DELTA_NET):
            ends = [f".{part}.weight" for part in stack]
            modules = {name.removesuffix(end) for name in self._bits for end in ends if name.endswith(end)}
            for stacked in [[f"{module}{end}" for end in ends] for module in modules]:
                bits = {self._bits.get(one) for one in stacked}
                may_differ = stack is not family.qkv or self._shapes.get(stacked[0], (0,))[0] // heads % _UNIT == 0
                if None in bits or (len(bits) > 1 and not may_differ):
                    for one in stacked:
                        self._bits.pop(one, None)

    def _read_gguf(self, folder: Path) -> None:
        index, known = read_index(folder), _UNIT_BITS if self._in_units else _GGUF_BITS
        is_tied = self._in_units is not None and not any(is_head(tensor.name) for tensor in index)
        for tensor in index:
            keeps_blocks = tensor.columns is None or tensor.columns.moves_whole(values_of(tensor.kind))
            is_matrix = len(tensor.shape) == 2 and tensor.form == "matrix" and keeps_blocks
            if (bits := known.get(tensor.kind)) and is_matrix and (is_tied or not is_table(tensor.name)):
                rows = self._shapes.get(tensor.name, (0,))[0]  # of its other parts
                self._note(tensor.name, (rows + tensor.shape[0], *tensor.shape[1:]), bits)

    def _read_plain(self, folder: Path, quantization: Quantization) -> None:
        shapes = {name: tuple(entry["shape"]) for name, entry in _entries(folder)}
        table = next((shape for name, shape in shapes.items() if is_table(name)), None)
        if table is not None and not any(map(is_head, shapes)):
            shapes[HEADS[0]] = table
        for name, shape in shapes.items():
            scheme = None if 0 in shape else scheme_for(quantization, name, shape)
            if scheme is not None and (len(shape) == 2 or self._in_units is not None):  # experts are numbers on GPUs
                rows = math.prod(shape[:-1]), shape[-1]
                self._note_scheme(name, rows, scheme, _HALF, _E4M3 if scheme.is_float else "I8")

    def _read_quantized(self, folder: Path) -> None:
        config = served_config(read_object(folder / "config.json"), folder)
        try:
            scheme = read_scheme(config)
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
            if not _is_matrix(entry["shape"]):
                continue  # which loading refuses
            shape = _shape_of(own, tuple(entry["shape"]))
            if self._in_units is None or not _has_order(entries, module, config):
                self._note_scheme(f"{module}.weight", shape, own, _scale_bits(entries, module), entry["dtype"])

    def _note_scheme(
        self, name: str, shape: tuple[int, ...], scheme: WeightScheme, scale_bits: int, dtype: str
    ) -> None:
        has_whole_units = (scheme.block[1] or _UNIT) % _UNIT == 0
        if self._in_units is None:
            self._note(name, shape, _bits_of(scheme, shape, scale_bits))
        elif has_whole_units and not scheme.is_float:
            self._note(name, shape, scheme.bits + (scale_bits + _ZERO_POINT * _has_zeros(scheme)) / _UNIT)
        elif has_whole_units and self._keeps_floats and dtype == _E4M3 and not _has_zeros(scheme):
            self._note(name, shape, _bits_of(scheme, shape, _FLOAT))


def _entries(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names of tensors, with the headers' entries; none for files that cannot be read."""
    for path in weight_files(folder):
        try:
            yield from read_header(path)[0].items()
        except (OSError, ValueError, RecursionError, struct.error):
            continue


def _is_matrix(shape: Sequence[int]) -> bool:
    return len(shape) == 2 and 0 not in shape


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
    """Each output has separate scales on a device, and a zero point of eight bits."""
    inputs = shape[1]
    groups = -(-inputs // (scheme.block[1] or inputs))
    return scheme.bits + groups * (scale_bits + _ZERO_POINT * _has_zeros(scheme)) / inputs


def _has_zeros(scheme: WeightScheme) -> bool:
    return not scheme.is_symmetric or scheme.layout in (Layout.GPTQ, Layout.AWQ)


def _has_order(entries: Mapping[str, Any], module: str, config: Mapping[str, Any]) -> bool:
    """Whether groups of inputs are in an order of activations."""
    asked = config.get("quantization_config")
    return f"{module}.weight_g_idx" in entries or (isinstance(asked, Mapping) and bool(asked.get("desc_act")))

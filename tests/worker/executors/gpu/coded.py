"""Quantized weights in memory, of all forms, for kernels on any device."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.worker.models.formats.codes import PackedCodes, PlainCodes
from holdfast.worker.models.formats.quantized_weight import QuantizedWeight

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def weight_of(
    kind: str, outputs: int, inputs: int, group: int, *, zeros: bool = False, scales: torch.dtype = BF16, by: str = ""
) -> QuantizedWeight:
    """Random codes, scales and zero points. `by`: inputs have their groups in no order."""
    rng = np.random.default_rng(inputs)
    bits, num_groups = 4 if kind == "int4" else 8, -(-inputs // group)
    stored = torch.from_numpy(rng.integers(0, 256, (outputs, inputs), dtype=np.uint8))
    if kind == "int4":
        codes: Any = PackedCodes(stored=pack(stored & 15), bits=4, packed_dim=1, middle=0 if zeros else 8)
    elif kind == "int8":
        codes = PlainCodes(stored.view(torch.int8))
    else:
        dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
        codes = PlainCodes(stored.clamp(0, 0x7B).view(dtype) if kind == "e5m2" else small_e4m3(stored))
    offsets = torch.from_numpy(rng.integers(0, 2**bits, (outputs, num_groups))).float() - (0 if kind == "int4" else 128)
    groups = torch.arange(inputs) // group
    return QuantizedWeight(
        rows=(0, outputs),
        columns=(0, inputs),
        codes=codes,
        scales=torch.from_numpy(0.01 + 0.02 * rng.random((outputs, num_groups))).to(scales),
        zeros=offsets if zeros else None,
        block_rows=1,
        groups=groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(0))] if by else groups,
        is_in_file=False,
    )


def small_e4m3(stored: Tensor) -> Tensor:
    """All codes but those that are no numbers."""
    return torch.where(stored & 0x7F == 0x7F, 0x81, stored).to(torch.uint8).view(torch.float8_e4m3fn)


def pack(codes: Tensor) -> Tensor:
    words = codes.int().view(len(codes), -1, 8) << (4 * torch.arange(8, dtype=torch.int32))
    return words.sum(-1, dtype=torch.int32)


FORMS: dict[str, dict[str, Any]] = {
    "int4 g32": {"kind": "int4", "inputs": 256, "group": 32},
    "int4 g128, zero points": {"kind": "int4", "inputs": 256, "group": 128, "zeros": True},
    "int4 g128, float16 scales": {"kind": "int4", "inputs": 160, "group": 128, "scales": F16},
    "int4, one group": {"kind": "int4", "inputs": 96, "group": 96, "zeros": True, "scales": F32},
    "int4 of few inputs": {"kind": "int4", "inputs": 40, "group": 8},
    "int4 in order of activations": {"kind": "int4", "inputs": 256, "group": 32, "zeros": True, "by": "order"},
    "int8 by output": {"kind": "int8", "inputs": 100, "group": 100},
    "int8 g32, zero points": {"kind": "int8", "inputs": 192, "group": 32, "zeros": True},
    "int8 in order of activations": {"kind": "int8", "inputs": 128, "group": 32, "by": "order"},
    "e4m3 by output": {"kind": "e4m3", "inputs": 200, "group": 200},
    "e4m3 g128": {"kind": "e4m3", "inputs": 300, "group": 128, "scales": F32},
    "e5m2": {"kind": "e5m2", "inputs": 64, "group": 64, "scales": F32},
}

"""Quantized weights as compressed-tensors stores them, and what config.json says of them: tensors and groups that vLLM
reads as well.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor

from holdfast.worker.config import Quantization
from holdfast.worker.models.quantization.codes import PackedCodes
from holdfast.worker.models.quantization.scheme import WeightScheme
from holdfast.worker.models.quantization.weight import QuantizedWeight

StoredScheme = Literal["int4", "int8", "fp8", "w8a16"]

QUANTIZATION_OF: Final[Mapping[StoredScheme, Quantization]] = {
    "int4": "int4",
    "int8": "int8",
    "fp8": "fp8",
    "w8a16": "int8",
}
"""The rule by which codes are chosen."""

_FORMATS: Final[Mapping[StoredScheme, str]] = {
    "int4": "pack-quantized",
    "int8": "int-quantized",
    "fp8": "float-quantized",
    "w8a16": "pack-quantized",
}
_IS_PACKED: Final = "pack-quantized"
_LINEAR: Final = "Linear"


def stored_tensors(weight: QuantizedWeight, scheme: StoredScheme) -> dict[str, Tensor]:
    """The tensors of a whole quantized weight, by the last parts of their names."""
    scales = {"weight_scale": weight.scales}
    if _FORMATS[scheme] != _IS_PACKED:
        return {"weight": weight.codes.stored, **scales}
    words = weight.codes.stored if isinstance(weight.codes, PackedCodes) else _words(weight.codes.stored)
    return {"weight_packed": words, **scales, "weight_shape": torch.tensor(weight.shape)}


def _words(codes: Tensor) -> Tensor:
    """Words of int8 codes [out, in], int32 [out, in / 4]: the codes plus 128, the first in the lowest bits."""
    unsigned = torch.nn.functional.pad(codes.view(torch.uint8) ^ 128, (0, -codes.shape[1] % 4))
    return unsigned.view(torch.int32)


def quantization_config(
    scheme: StoredScheme, schemes: Mapping[str, WeightScheme], plain: Sequence[str], heads: Iterable[str]
) -> dict[str, Any]:
    """The `quantization_config` of a model: `schemes` by the names of modules that are quantized, `plain` those that
    are not. Heads are targets by their names: vLLM does not take them for linears.
    """
    kinds = list(dict.fromkeys(schemes.values()))
    kinds.sort(key=lambda kind: kind.bits)  # that of most linears first
    groups = {}
    for number, kind in enumerate(kinds):
        named = [module for module, own in schemes.items() if own is kind and (number > 0 or module in heads)]
        targets = [*([_LINEAR] if number == 0 else []), *named]
        groups[f"group_{number}"] = {
            "targets": targets,
            "weights": _weights(kind),
            "input_activations": None if _FORMATS[scheme] == _IS_PACKED else _activations(kind),
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[scheme],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": list(plain),
        "config_groups": groups,
    }


def _weights(kind: WeightScheme) -> dict[str, Any]:
    _, group = kind.block
    return {
        "num_bits": kind.bits,
        "type": "float" if kind.is_float else "int",
        "symmetric": True,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
        "observer": "mse" if kind.bits == 4 else "minmax",
    }


def _activations(kind: WeightScheme) -> dict[str, Any]:
    """Entry for activations of 8 bits, whose scale a runtime finds for each token."""
    return {
        "num_bits": 8,
        "type": "float" if kind.is_float else "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }

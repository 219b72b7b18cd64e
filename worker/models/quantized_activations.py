"""Which arithmetic quantized weights are served in: whether their inputs are quantized too, and how they lie then."""

from enum import Enum
from pathlib import Path

import torch

from holdfast.worker.config import ModelConfig
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models.coded_bytes import CodedBytes
from holdfast.worker.models.families import FAMILIES

_WAY_OUT = "leave --quantized-activations at auto, or set bfloat16"


class Kept(Enum):
    """Form of quantized weights when they are multiplied, if their storage allows it."""

    NUMBERS = "numbers"
    """They are dequantized while they are loaded."""
    UNITS = "units"
    """Units, whose inputs are quantized too: on CPUs."""
    CODES = "codes"
    """Codes, which become the numbers that they would be dequantized to at each product: on GPUs."""


def kept_form(config: ModelConfig, device: str, dtype: torch.dtype) -> Kept:
    """Form for a model that is served in `dtype`. It never depends on the machine's CPU. Serving in float32 asks for
    exact products.
    """
    if device != "cpu":
        return Kept.CODES
    if config.quantized_activations == "auto":
        return Kept.NUMBERS if dtype == torch.float32 else Kept.UNITS
    return Kept.UNITS if config.quantized_activations == "int8" else Kept.NUMBERS


def coded_bytes(config: ModelConfig, folder: Path, device: str, model_type: str) -> CodedBytes | None:
    """The memory of what stays codes on a device; None where all weights are dequantized."""
    family = FAMILIES.get(model_type)
    is_read = config.executor != "hf" and config.load_format != "dummy"
    if device == "cpu" or not is_read or family is None or family.on_cpus_alone:
        return None
    return CodedBytes(folder, config.quantization)


def check_quantized_activations(config: ModelConfig, device: str) -> None:
    """Raises `ConfigurationError` where int8 is asked for and cannot be."""
    if config.quantized_activations != "int8":
        return
    if device != "cpu":
        raise refused("GPUs multiply quantized weights as bfloat16")
    if config.executor == "hf":
        raise refused("the HF backend multiplies quantized weights as bfloat16")
    if config.load_format == "dummy":
        raise refused("random weights are not quantized")


def refused(reason: str) -> ConfigurationError:
    """The error of a model that is to be served in int8, for a reason."""
    return ConfigurationError(f"model.quantized_activations = 'int8': {reason}; {_WAY_OUT}")

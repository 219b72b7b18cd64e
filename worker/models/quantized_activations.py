"""Which arithmetic quantized weights are served in: whether their inputs are quantized too, and how they lie then."""

from enum import Enum

import torch

from holdfast.worker.config import ModelConfig
from holdfast.worker.errors import ConfigurationError

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
    """The error of a model that shall be served in int8, with the reason."""
    return ConfigurationError(f"model.quantized_activations = 'int8': {reason}; {_WAY_OUT}")

"""Which arithmetic quantized weights are served in: whether their inputs are quantized too."""

from holdfast.worker.config import ModelConfig
from holdfast.worker.errors import ConfigurationError

_WAY_OUT = "leave --quantized-activations at auto, or set bfloat16"


def asks_for_units(config: ModelConfig, device: str) -> bool:
    """Whether weights that lie in units stay in them. It never depends on what the machine's CPU is capable of."""
    return config.quantized_activations == "int8" and device == "cpu"


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

"""Quantization scheme in words, as commands, APIs and the page say it: `AWQ int4 g128`, `none`."""

from typing import Final

from holdfast.worker.models.quantization.scheme import QuantizationScheme, WeightScheme

NOT_QUANTIZED: Final = "none"

_NAMES: Final = {"awq": "AWQ", "gptq": "GPTQ", "mxfp4": "MXFP4"}


def words_of(scheme: QuantizationScheme | None) -> str:
    """Quantization of a checkpoint's weights, in words; exceptions that GPTQ names for single modules are left out."""
    if scheme is None:
        return NOT_QUANTIZED
    name = _NAMES.get(scheme.method, scheme.method)
    if scheme.method == "mxfp4":
        return name
    if scheme.method == "compressed-tensors":
        groups = dict.fromkeys(_compressed(weights) for _, weights in scheme.groups)
        return f"{name} {' + '.join(groups)}"
    _, of_linears = scheme.groups[-1]
    if scheme.method == "fp8":
        return f"{name} {sharing(of_linears.block)}"
    return f"{name} int{of_linears.bits} {sharing(of_linears.block)}"


def sharing(block: tuple[int | None, int | None]) -> str:
    """Which weights share a scale: `g128` of an output, `per channel`, `per tensor`, `block 128x128`."""
    outputs, inputs = block
    if outputs == 1:
        return "per channel" if inputs is None else f"g{inputs}"
    return "per tensor" if outputs is None else f"block {outputs}x{inputs}"


def _compressed(weights: WeightScheme) -> str:
    """Name of a compressed-tensors preset by the bits of weights and activations."""
    kind = " fp8" if weights.is_float else ""
    zeros = "" if weights.is_symmetric else " asymmetric"
    return f"W{weights.bits}A{weights.activation_bits}{kind} {sharing(weights.block)}{zeros}"

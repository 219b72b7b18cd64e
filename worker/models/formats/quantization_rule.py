"""Rule of quantization at load and of `holdfast quantize`: which weights of a plain checkpoint become codes, and how.

Linears of layers get the scheme that is asked for; where 4 bits do not fit, because a group would not have all its
inputs, 8 bits. The head, that of a model whose head is its table too, gets 8 bits. All else stays as it is: the table
of embeddings, of which a token reads one row, routers of experts, convolutions, norms, biases.

Schemes, those of the rule and those of checkpoints, in words: `AWQ int4 g128`, `none`, as commands, APIs and the page
have them.
"""

import re
from typing import Final

from holdfast.worker.config import Quantization
from holdfast.worker.models.formats.quantization_scheme import Layout, QuantizationScheme, WeightScheme

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


GROUP: Final = 32
"""Inputs that share a scale of 4 bits."""

_VERSION: Final = 2
"""Goes up where the same weights get other codes."""

INT4: Final = WeightScheme(layout=Layout.PACKED, bits=4, block=(1, GROUP))
INT8: Final = WeightScheme(layout=Layout.PLAIN, bits=8, block=(1, None))
FP8: Final = WeightScheme(layout=Layout.PLAIN, bits=8, block=(1, None), is_float=True)

_OF_LINEARS: Final = {"int4": INT4, "int8": INT8, "fp8": FP8}
_OF_HEADS: Final = {"int4": INT8, "int8": INT8, "fp8": FP8}

HEADS: Final = ("lm_head.weight", "embed_out.weight", "output_projection.weight")
TABLES: Final = (
    *("embed_tokens.weight", "embed_in.weight", "wte.weight"),
    *("backbone.embeddings.weight", "model.embeddings.weight"),
)
"""Ends of the names of heads and of tables of embeddings."""

_IN_A_LAYER: Final = re.compile(r"(^|\.)(layers|h)\.\d+\.")
_ROUTERS: Final = re.compile(r"\.(gate(\.wg)?|shared_expert_gate|router(\..*)?)\.weight$")
_NORMS: Final = re.compile(r"norm\.weight$")
"""Norms, whose weights are [heads, head dimension] where heads differ."""


def scheme_for(quantization: Quantization, name: str, shape: tuple[int, ...]) -> WeightScheme | None:
    """Quantization of the tensor of this name in a plain checkpoint, of each expert's weight where it has those of
    several; None: it stays as it is.
    """
    if is_head(name):
        return _OF_HEADS[quantization]
    is_linear = (len(shape) == 2 and name.endswith(".weight")) or has_layers_experts(name, shape)
    if not is_linear or not _IN_A_LAYER.search(name) or _ROUTERS.search(name) or _NORMS.search(name):
        return None
    scheme = _OF_LINEARS[quantization]
    return INT8 if scheme is INT4 and shape[-1] % GROUP else scheme


def is_head(name: str) -> bool:
    """Whether a tensor is the head, by its name."""
    return name.endswith(HEADS)


def is_table(name: str) -> bool:
    """Whether a tensor is the table of embeddings, by its name."""
    return name.endswith(TABLES)


def has_layers_experts(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor has the weights of several experts of a layer: a convolution's are [channels, 1, width]."""
    is_stack = sum(length > 1 for length in shape) > 2
    return is_stack and _IN_A_LAYER.search(name) is not None


def words_at_load(quantization: Quantization) -> str:
    """Description of the quantization, in words."""
    return f"{quantization} {sharing(_OF_LINEARS[quantization].block)} at load"


def rule_name(quantization: Quantization) -> str:
    """Names the rule: equal names, equal codes."""
    return f"{quantization}-{_VERSION}"

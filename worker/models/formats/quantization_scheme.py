"""Quantization scheme of a checkpoint: what `quantization_config` in config.json says of the weights of each module.

It reads no tensors and needs no torch, so that a command can look before anything is started.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, NoReturn

from holdfast.worker.errors import UnsupportedModelError

WAY_OUT: Final = (
    "Serve the checkpoint that is not quantized, or one in GGUF, compressed-tensors, AWQ, GPTQ, fp8 or MXFP4 as "
    "docs/quantization.md lists them"
)
_PACKED_BITS: Final = (4, 8)


class Layout(Enum):
    """Layout of a weight's codes [out, in] in its file."""

    PLAIN = "plain"
    """int8 or fp8 numbers [out, in]."""
    PACKED = "packed"
    """compressed-tensors: int32 [out, in / codes of a word]."""
    GPTQ = "gptq"
    """int32 [in / codes of a word, out]."""
    AWQ = "awq"
    """int32 [in, out / 8], the codes of a word in a format-specific order."""
    MXFP4 = "mxfp4"
    """gpt-oss's experts: uint8 [expert, out, in / 32, 16]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """Quantization of a module's weights."""

    layout: Layout
    bits: int
    block: tuple[int | None, int | None]
    """Outputs and inputs that share a scale; None: all of them."""
    is_symmetric: bool = True
    """There are no zero points, or they are the middle of the codes."""
    zeros_are_less_one: bool = False
    """Stored zero points are one less than their values, as in the first version of GPTQ's files."""
    is_float: bool = False
    """Codes are floating-point numbers of these bits."""
    activation_bits: int = 16
    """Bits of the activations that the checkpoint was made for; the computation may use others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationScheme:
    """Quantization of a model's weights."""

    method: str
    groups: tuple[tuple[tuple[str, ...], WeightScheme], ...]
    """Names of modules, `re:` and a regular expression, or classes of modules; and how theirs are quantized."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantized: names, ends or beginnings of names, or `re:` and a regular expression."""

    def of(self, module: str) -> WeightScheme | None:
        """Quantization of this module's weights; None: none."""
        if any(_is_ignored(module, pattern) for pattern in self.ignored):
            return None
        for targets, scheme in self.groups:
            if any(_is_named(module, target) for target in targets):
                return scheme
        is_table = module.endswith("embed_tokens")
        classes = {"Embedding"} if is_table else {"Linear"}
        return next((scheme for targets, scheme in self.groups if classes & set(targets)), None)


def _is_named(module: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return module == target


def _is_ignored(module: str, pattern: str) -> bool:
    return _is_named(module, pattern) or f".{pattern}." in f".{module}."


def read_scheme(config: Mapping[str, Any]) -> QuantizationScheme | None:
    """The scheme of a model by its config.json; None: it is not quantized.

    Raises `UnsupportedModelError` that names an unsupported scheme.
    """
    found = config.get("quantization_config")
    if found is None or found == {}:
        return None
    model_type = str(config.get("model_type"))
    if not isinstance(found, Mapping):
        raise UnsupportedModelError(model_type, f"its quantization_config is {str(found)[:100]}", WAY_OUT)
    return _Reader(model_type, found).scheme()


class _Reader:
    """Reads one quantization_config."""

    def __init__(self, model_type: str, found: Mapping[str, Any]) -> None:
        self._model_type = model_type
        self._found = found

    def scheme(self) -> QuantizationScheme:
        method = str(self._found.get("quant_method", "unnamed"))
        readers = {
            "awq": self._awq,
            "compressed-tensors": self._compressed_tensors,
            "fp8": self._fp8,
            "gptq": self._gptq,
            "mxfp4": self._mxfp4,
        }
        if method not in readers:
            self._refuse(f"by the method {method!r}, which is not supported")
        return readers[method]()

    def _refuse(self, reason: str) -> NoReturn:
        raise UnsupportedModelError(self._model_type, f"its weights are quantized {reason}", WAY_OUT)

    def _one_of(self, found: Mapping[str, Any], key: str, values: Sequence[Any], default: Any = None) -> Any:
        value = found.get(key, default)
        if not any(type(value) is type(one) and value == one for one in values):
            self._refuse(f"with {key} = {str(value)[:100]!r}; supported: {', '.join(map(str, values))}")
        return value

    def _group_size(self, found: Mapping[str, Any], key: str = "group_size") -> int | None:
        """Inputs that share a scale; None for -1: all of them."""
        size = found.get(key)
        if type(size) is not int or (size <= 0 and size != -1):
            self._refuse(f"with {key} = {str(size)[:100]!r}; must be -1 or a number above 0")
        return None if size == -1 else size

    def _block(self, value: Any, key: str) -> tuple[int, int]:
        if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
            self._refuse(f"with {key} = {str(value)[:100]!r}; must be two numbers above 0")
        return value[0], value[1]

    def _names(self, *keys: str) -> tuple[str, ...]:
        """A list of modules, under one of these keys."""
        value: Any = next((self._found[key] for key in keys if self._found.get(key) is not None), [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._refuse(f"with {keys[0]} = {str(value)[:100]!r}; must be a list of names")
        for name in value:
            self._check_pattern(name)
        return tuple(value)

    def _check_pattern(self, name: str) -> None:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            self._refuse(f"with the pattern {name!r}, which is not a regular expression ({error})")

    def _awq(self) -> QuantizationScheme:
        found = self._found
        bits = self._one_of({"bits": found.get("bits", found.get("w_bit"))}, "bits", (4,))
        group = self._group_size({"group_size": found.get("group_size", found.get("q_group_size"))})
        self._one_of({"version": str(found.get("version", "gemm")).lower()}, "version", ("gemm",))
        self._one_of(found, "backend", ("autoawq", None), "autoawq")
        scheme = WeightScheme(layout=Layout.AWQ, bits=bits, block=(1, group), is_symmetric=False)
        return QuantizationScheme(
            method="awq", groups=((("Linear",), scheme),), ignored=self._names("modules_to_not_convert")
        )

    def _gptq(self) -> QuantizationScheme:
        found = self._found
        form = self._one_of(found, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        if found.get("is_marlin_format"):
            self._refuse("in Marlin's layout, which is not supported")
        scheme = WeightScheme(
            layout=Layout.GPTQ,
            bits=self._one_of(found, "bits", _PACKED_BITS),
            block=(1, self._group_size(found)),
            is_symmetric=self._one_of(found, "sym", (True, False), True),
            zeros_are_less_one=form == "gptq",
        )
        groups, skipped = self._overrides(scheme)
        ignored = (*self._names("modules_to_not_convert"), *skipped)
        return QuantizationScheme(method="gptq", groups=(*groups, (("Linear",), scheme)), ignored=ignored)

    def _overrides(self, scheme: WeightScheme) -> tuple[list[tuple[tuple[str, ...], WeightScheme]], list[str]]:
        """GPTQModel's `dynamic`: other values for modules by regular expressions, `-:` for unquantized ones."""
        groups: list[tuple[tuple[str, ...], WeightScheme]] = []
        skipped: list[str] = []
        found = self._found.get("dynamic") or {}
        if not isinstance(found, Mapping):
            self._refuse(f"with dynamic = {str(found)[:100]!r}; must be a mapping")
        for pattern, values in found.items():
            target = "re:" + str(pattern).removeprefix("-:").removeprefix("+:")
            self._check_pattern(target)
            if str(pattern).startswith("-:"):
                skipped.append(target)
                continue
            values = values if isinstance(values, Mapping) else {}
            group = self._group_size(values) if "group_size" in values else scheme.block[1]
            changed = replace(
                scheme,
                bits=self._one_of(values, "bits", _PACKED_BITS, scheme.bits),
                block=(1, group),
                is_symmetric=self._one_of(values, "sym", (True, False), scheme.is_symmetric),
            )
            groups.append(((target,), changed))
        return groups, skipped

    def _fp8(self) -> QuantizationScheme:
        found = self._found
        self._one_of({"fmt": str(found.get("fmt", "e4m3")).lower()}, "fmt", ("e4m3", "float8_e4m3fn", "e5m2"))
        size = found.get("weight_block_size")
        block = (None, None) if size is None else self._block(size, "weight_block_size")
        scheme = WeightScheme(layout=Layout.PLAIN, bits=8, block=block, is_float=True)
        ignored = self._names("modules_to_not_convert", "ignored_layers")
        return QuantizationScheme(method="fp8", groups=((("Linear",), scheme),), ignored=ignored)

    def _mxfp4(self) -> QuantizationScheme:
        scheme = WeightScheme(layout=Layout.MXFP4, bits=4, block=(1, 32), is_float=True)
        targets = (r"re:.*\.experts\.(gate_up_proj|down_proj)$",)
        ignored = self._names("modules_to_not_convert")
        return QuantizationScheme(method="mxfp4", groups=((targets, scheme),), ignored=ignored)

    def _compressed_tensors(self) -> QuantizationScheme:
        found = self._found
        self._one_of(found, "quantization_status", ("compressed", None), "compressed")
        sparse = found.get("sparsity_config") or {}
        form = sparse.get("format", "dense") if isinstance(sparse, Mapping) else sparse
        if form != "dense":
            self._refuse(f"and sparse ({str(form)[:40]}), which is not supported")
        transforms = found.get("transform_config") or {}
        if not isinstance(transforms, Mapping) or transforms.get("config_groups"):
            self._refuse("with transforms of activations (transform_config), which are not computed")
        groups = found.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            self._refuse("without config_groups, which say how")
        return QuantizationScheme(
            method="compressed-tensors",
            groups=tuple(self._config_group(group) for group in groups.values()),
            ignored=self._names("ignore"),
        )

    def _config_group(self, group: Any) -> tuple[tuple[str, ...], WeightScheme]:
        targets = group.get("targets") if isinstance(group, Mapping) else None
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(targets, list) or not isinstance(weights, Mapping):
            self._refuse("with config_groups that lack targets or weights")
        for target in targets:
            self._check_pattern(str(target))
        form = str(group.get("format") or self._found.get("format"))
        kind = self._one_of(weights, "type", ("int", "float"), "int")
        forms = {"pack-quantized": "int", "int-quantized": "int", "float-quantized": "float", "naive-quantized": kind}
        self._one_of({"format": form}, "format", tuple(forms))
        if forms[form] != kind:
            self._refuse(f"in the format {form} with numbers of type {kind}")
        is_packed = form == "pack-quantized"
        scheme = WeightScheme(
            layout=Layout.PACKED if is_packed else Layout.PLAIN,
            bits=self._one_of(weights, "num_bits", _PACKED_BITS if is_packed else (8,), 8),
            block=self._strategy(weights),
            is_symmetric=self._one_of(weights, "symmetric", (True, False), True),
            is_float=kind == "float",
            activation_bits=_activation_bits(group.get("input_activations")),
        )
        return tuple(map(str, targets)), scheme

    def _strategy(self, weights: Mapping[str, Any]) -> tuple[int | None, int | None]:
        """Outputs and inputs that share a scale."""
        size = weights.get("group_size")
        default = "tensor" if size is None else "channel" if size == -1 else "group"
        strategy = weights.get("strategy") or default
        self._one_of({"strategy": strategy}, "strategy", ("tensor", "channel", "group", "block"))
        if strategy == "tensor":
            return None, None
        if strategy == "channel":
            return 1, None
        if strategy == "group":
            return 1, self._group_size(weights)
        return self._block(weights.get("block_structure"), "block_structure")


def _activation_bits(found: Any) -> int:
    """Bits of a group's `input_activations`; 16 if none are given."""
    bits = found.get("num_bits") if isinstance(found, Mapping) else None
    return bits if type(bits) is int else 16


# --- tensors of a quantized module in its file, by the last parts of their names ---

_CODES: Final = {"weight_packed": "I32", "qweight": "I32"}
_BESIDE: Final = (
    *("qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape"),
    "weight_g_idx",
)
"""Last parts of the names of tensors that belong to codes."""

UNUSED: Final = frozenset(
    {"input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"}
    | {"activation_scale", "q_scale", "k_scale", "v_scale", "inv_freq"}
)
"""Tensors of activations and of the KV cache, which stay in the type that is served; and angles that are computed."""


def num_weights(scheme: QuantizationScheme, name: str, dtype: str, shape: Sequence[int]) -> int:
    """Number of weights in the tensor of this name, type (as a header names it) and shape."""
    module, _, kind = name.rpartition(".")
    count = math.prod(shape)
    if kind in _BESIDE or kind in UNUSED or kind.endswith("_scales"):
        return 0
    if kind.endswith("_blocks"):
        return 2 * count
    if _CODES.get(kind) == dtype:
        found = scheme.of(module)
        return count * (32 // found.bits) if found else count
    return count

"""Forms of adapters: all that `adapter_config.json` and the header of `adapter_model.safetensors` say, checked field by
field, as PEFT writes them. Adapters that are trained one after the other have one form.
"""

import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import regex
import torch

from holdfast.worker.adapter import CONFIG, WEIGHTS
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.adapters import LowRank, StoredMatrix
from holdfast.worker.models.safetensors_files import DTYPES
from holdfast.worker.models.safetensors_header import StoredTensor, read_tensors

MAX_RANK: Final = 256  # rank of a LoRA matrix
MAX_PATTERN: Final = 2000  # characters

_MAX_SHOWN: Final = 200
"""Characters of a value in messages."""
_MATCH_S: Final = 0.1
"""Seconds that a regular expression of a config may take for a module's name."""

_TENSOR: Final = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_"
    r"((?P<part>[AB])(\.default)?\.weight|embedding_(?P<of_table>[AB])(\.default)?)"
)
_WRAPPED: Final = re.compile(r"(\.base_layer)+$")
"""End that PEFT gives the name of a module for each parameter with an adapter but the last one."""
EXPERTS: Final = ".experts"
"""End of the name of a module that has the weights of a mixture's experts."""
_COPY: Final = re.compile(r"base_model\.model\.(?P<module>.+)\.base_layer\.weight")

_HARMLESS: Final = frozenset(
    {"auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "runtime_config"}
    | {"lora_dropout", "corda_config", "eva_config", "loftq_config", "megatron_config", "megatron_core", "task_type"}
    | {"layers_to_transform", "layers_pattern", "exclude_modules", "lora_ga_config"}
    | {"qalora_group_size"}
)
"""Fields that do not affect the file's tensors."""
_READ: Final = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern"}
    | {"bias", "init_lora_weights", "target_parameters"}
)
_INITIALIZED: Final = (True, False, "gaussian", "eva", "orthogonal", None)
"""Values of `init_lora_weights` that leave the base model's weights as they are."""


class Pair(NamedTuple):
    """Both matrices of a module, or of a parameter of a module."""

    a: StoredMatrix
    b: StoredMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterForm:
    """Which matrices of which modules an adapter has, and where they lie in the content of its file."""

    base: str
    """Base model named by the adapter; empty: none."""
    targets: str | tuple[str, ...]
    parameters: tuple[str, ...]
    """Ends of the names of parameters that are adapted without a module of their own, as those of experts."""
    config: Mapping[str, Any]
    """Content of `adapter_config.json`."""
    matrices: Mapping[str, StoredMatrix]
    """Stored matrices by the names of their tensors."""
    modules: Mapping[str, LowRank]
    """Pairs of matrices by the names of Hugging Face's modules."""
    stacks: Mapping[str, tuple[Pair, ...]]
    """Pairs of matrices of parameters of experts, by the module that has these as the folder names it."""
    copies: Mapping[str, StoredMatrix]
    """Weights of the model itself, by module, which PEFT saves beside adapters of the embedding and of the head."""
    prefixes: tuple[str, str] = ("", "")
    """Beginnings of the names of the model's modules, and of the names that the adapter has for them."""

    def names(self, given: str, module: str) -> bool:
        """Whether the adapter's targets name a module, or its weight."""
        own, theirs = self.prefixes
        name = theirs + module.removeprefix(own) if module.startswith(own) else module
        return _matches(given, self.targets, name) or self.names_parameter(f"{name}.weight")

    def names_parameter(self, name: str) -> bool:
        """Whether they name a parameter."""
        return _ends_with(self.parameters, name)

    def rank_and_scale(self, given: str, name: str) -> tuple[int, float]:
        """Rank of a module, or of a parameter of experts, and what its addition is multiplied by."""
        return _rank_and_scale(given, self.config, name)


def form_of(given: str, config_content: bytes, path: Path, weights: memoryview, size: int) -> AdapterForm:
    """The form of an adapter, by the first bytes of a file of this size. Raises `ConfigurationError` with `given`, its
    name and folder, and the fault.
    """
    config = _object(given, config_content)
    _check_fields(given, config)
    matrices = _matrices(given, path, weights, size)
    targets = config.get("target_modules")
    found = AdapterForm(
        base=str(config.get("base_model_name_or_path") or "")[:_MAX_SHOWN],
        targets=targets if isinstance(targets, str) else tuple(targets or ()),
        parameters=tuple(config.get("target_parameters") or ()),
        config=config,
        matrices=matrices,
        modules={},
        stacks={},
        copies=_copies(given, matrices),
    )
    pairs = _pairs(given, matrices)
    stacks = _stacks(found, pairs)
    of_parameters = {name for names in stacks.values() for name in names}
    modules = {name: pair for name, pair in pairs.items() if name not in of_parameters and found.names(given, name)}
    if strangers := pairs.keys() - modules.keys() - of_parameters:
        what = f"it has tensors of {min(strangers)}, which its target_modules do not name"
        raise refused(given, found.base, what)
    return replace(
        found,
        modules={name: _low_rank(given, config, name, pair) for name, pair in sorted(modules.items())},
        stacks={owner: tuple(pairs[name] for name in names) for owner, names in sorted(stacks.items())},
    )


def refused(given: str, base: str, what: str) -> ConfigurationError:
    """Error that names the adapter and the model that it was made for."""
    of = f" (made for {base})" if base else ""
    return ConfigurationError(f"{given}{of}: {what}")


def _object(given: str, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{given}: {CONFIG} is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{given}: {CONFIG} holds no JSON object")
    return found


def _check_fields(given: str, config: Mapping[str, Any]) -> None:
    def refuse(field: str, why: str) -> ConfigurationError:
        return ConfigurationError(f"{given}: {CONFIG} has {field} = {str(config.get(field))[:_MAX_SHOWN]!r}: {why}")

    if config.get("peft_type") != "LORA":
        raise refuse("peft_type", "only LORA is served")
    if config.get("bias", "none") != "none":
        raise refuse("bias", "biases of adapters are not served; only 'none' is")
    if config.get("init_lora_weights", True) not in _INITIALIZED:
        raise refuse(
            "init_lora_weights", "it changes the base model's weights; convert it to a plain adapter with PEFT"
        )
    targets, parameters = config.get("target_modules"), config.get("target_parameters")
    if parameters and not _is_list(parameters):
        raise refuse("target_parameters", "must be a list of names")
    if not (isinstance(targets, str) or _is_list(targets or [])) or not (targets or parameters):
        raise refuse("target_modules", "must be a list of names, a regular expression, or all-linear")
    if isinstance(targets, str) and len(targets) > MAX_PATTERN:
        raise refuse("target_modules", f"a regular expression has at most {MAX_PATTERN} characters")
    if isinstance(targets, str):
        _fullmatch(given, targets, "")
    if config.get("use_rslora") not in (True, False, None):
        raise refuse("use_rslora", "must be true or false")
    for field in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(field) or {}, dict):
            raise refuse(field, "must be an object")
    for field in sorted(config.keys() - _HARMLESS - _READ):
        if config[field]:
            raise refuse(field, "it changes the adapter's arithmetic, and is not supported")


def _is_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _pairs(given: str, matrices: Mapping[str, StoredMatrix]) -> dict[str, Pair]:
    """Matrices by module, as the file names them."""
    found: dict[str, dict[str, StoredMatrix]] = {}
    for name, matrix in matrices.items():
        if _COPY.fullmatch(name):
            continue
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ConfigurationError(
                f"{given}: the tensor {name[:_MAX_SHOWN]} is not supported: only lora_A and lora_B of linears, of the "
                "embedding and of the head are"
            )
        parts = found.setdefault(match["module"], {})
        part = match["part"] or match["of_table"]
        if part in parts:
            raise ConfigurationError(f"{given}: {match['module']} has lora_{part} twice")
        parts[part] = matrix
    if not found:
        raise ConfigurationError(f"{given}: {WEIGHTS} has no tensors")
    for module, parts in sorted(found.items()):
        for part in "AB":
            if part not in parts:
                raise ConfigurationError(f"{given}: {module} has no lora_{part}")
    return {module: Pair(parts["A"], parts["B"]) for module, parts in found.items()}


def _stacks(form: AdapterForm, pairs: Iterable[str]) -> dict[str, list[str]]:
    """Names of pairs of experts' parameters by the module that has these, in the order of its parameters."""
    found = defaultdict[str, list[str]](list)
    for name in sorted(pairs, key=len, reverse=True):
        owner = _WRAPPED.sub("", name)
        if owner.endswith(EXPERTS) and any(
            form.names_parameter(f"{owner}.{one.rpartition('.')[2]}") for one in form.parameters
        ):
            found[owner].append(name)
    return found


def _copies(given: str, matrices: Mapping[str, StoredMatrix]) -> dict[str, StoredMatrix]:
    found = {match["module"]: one for name, one in matrices.items() if (match := _COPY.fullmatch(name)) is not None}
    for module, one in found.items():
        if len(one.shape) != 2 or not one.dtype.is_floating_point or one.dtype.itemsize < 2:
            what = f"{module}.base_layer.weight is {one.dtype} {one.shape}, and must be a matrix of a floating type"
            raise ConfigurationError(f"{given}: {what}")
    return found


def _matrices(given: str, path: Path, weights: memoryview, size: int) -> dict[str, StoredMatrix]:
    """Matrices in a file's content, by name."""
    try:
        tensors = read_tensors(path, weights, size)
        dtypes = {name: _checked_dtype(name, entry) for name, entry in tensors.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError, struct.error) as error:
        raise ConfigurationError(f"{given}: {WEIGHTS} is not a safetensors file, or is cut short ({error})") from error
    return {name: _matrix(given, name, dtypes[name], entry) for name, entry in tensors.items()}


def _checked_dtype(name: str, entry: StoredTensor) -> torch.dtype:
    """Raises `ValueError` where the place of a tensor is not as long as its numbers."""
    dtype, num_bytes = DTYPES[entry.kind], entry.end - entry.first
    if num_bytes != prod(entry.shape) * dtype.itemsize:
        raise ValueError(f"{name} of {entry.kind} {entry.shape} has {num_bytes} bytes")
    return dtype


def _matrix(given: str, name: str, dtype: torch.dtype, entry: StoredTensor) -> StoredMatrix:
    if _TENSOR.fullmatch(name) and (not dtype.is_floating_point or len(entry.shape) != 2 or dtype.itemsize < 2):
        what = f"{name} is {dtype} {tuple(entry.shape)}, and must be a matrix of a floating type"
        raise ConfigurationError(f"{given}: {what}")
    return StoredMatrix(dtype, tuple(entry.shape), entry.first)  # type: ignore[arg-type]  # others are refused


def _low_rank(given: str, config: Mapping[str, Any], module: str, pair: Pair) -> LowRank:
    a, b = pair
    rank, scale = _rank_and_scale(given, config, module)
    if a.shape[0] != rank or b.shape[1] != rank:
        raise ConfigurationError(
            f"{given}: {module} has lora_A {a.shape} and lora_B {b.shape}, and {CONFIG} says rank {rank:g}"
        )
    return LowRank(a=a, b=b, scale=scale)


def _rank_and_scale(given: str, config: Mapping[str, Any], module: str) -> tuple[int, float]:
    rank, alpha = (
        _number(given, config, module, *names) for names in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern"))
    )
    if rank != int(rank) or not 1 <= rank <= MAX_RANK:
        raise ConfigurationError(
            f"{given}: {module} has rank {rank:g}, and must have a whole number from 1 to {MAX_RANK}"
        )
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    if not scale:
        raise ConfigurationError(f"{given}: {module} has lora_alpha = {alpha:g}, by which nothing would be added")
    return int(rank), scale


def _number(given: str, config: Mapping[str, Any], module: str, field: str, pattern: str) -> float:
    """The module's own number, by the first pattern that it ends with, as PEFT matches it; or that of all."""
    found = config.get(field)
    for key, value in (config.get(pattern) or {}).items():
        if len(key) > MAX_PATTERN:
            raise ConfigurationError(f"{given}: a key of {pattern} has more than {MAX_PATTERN} characters")
        if _fullmatch(given, rf"(.*\.)?({key})", module):
            found = value
            break
    if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) < 1e9:
        raise ConfigurationError(f"{given}: {CONFIG} has {field} = {str(found)[:_MAX_SHOWN]!r}, and must have a number")
    return float(found)


def _fullmatch(given: str, pattern: str, name: str) -> bool:
    """Raises `ConfigurationError` for an invalid pattern, and one that takes too long: a match holds up all threads."""
    try:
        return regex.fullmatch(pattern, name, timeout=_MATCH_S, concurrent=True) is not None
    except regex.error as error:
        raise ConfigurationError(f"{given}: {_shown(pattern)} is no regular expression ({error})") from error
    except TimeoutError:
        limit = f"takes longer than {_MATCH_S} s for {name}: write it without nested repetitions"
        raise ConfigurationError(f"{given}: the regular expression {_shown(pattern)} {limit}") from None


def _shown(pattern: str) -> str:
    return repr(pattern[:_MAX_SHOWN])


def _matches(given: str, targets: str | tuple[str, ...], module: str) -> bool:
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return _fullmatch(given, targets, module)
    return _ends_with(targets, module)


def _ends_with(ends: Iterable[str], name: str) -> bool:
    """Whether a name is one of these, or ends with one."""
    return any(name == one or name.endswith(f".{one}") for one in ends)

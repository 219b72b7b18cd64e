"""Adapter folders as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`, checked field by field.

Both files are read once, and their digest is computed from the same bytes that are later applied.
"""

import json
import os
import re
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import regex
import torch
from torch import Tensor

from holdfast.worker.adapter import CONFIG, WEIGHTS, check_adapter_name, described, digest_of, files_in, unreadable
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.cpu.adapters import LowRank
from holdfast.worker.executors.cpu.tile_memory import mapped_memory
from holdfast.worker.executors.finite import not_finite
from holdfast.worker.models.safetensors_files import DTYPES
from holdfast.worker.models.safetensors_header import StoredTensor, read_tensors

MAX_RANK: Final = 256  # rank of a LoRA matrix
MAX_PATTERN: Final = 2000  # characters

_MAX_SHOWN: Final = 200
"""Characters of a value in messages."""
_MATCH_S: Final = 0.1
"""Seconds that a regular expression of a config may take for a module's name."""

_PIECE: Final = 4 << 20  # bytes read at a time

_TENSOR: Final = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])(\.default)?\.weight")

_HARMLESS: Final = frozenset(
    {"auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "runtime_config"}
    | {"lora_dropout", "corda_config", "eva_config", "loftq_config", "megatron_config", "megatron_core", "task_type"}
    | {"layers_to_transform", "layers_pattern", "exclude_modules", "lora_ga_config"}
    | {"qalora_group_size"}
)
"""Fields that do not affect the file's tensors."""
_READ: Final = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern"}
    | {"bias", "init_lora_weights"}
)
_INITIALIZED: Final = (True, False, "gaussian", "eva", "orthogonal", None)
"""Values of `init_lora_weights` that leave the base model's weights as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    """The content of a folder."""

    given: str
    """Name and folder, for errors."""
    base: str
    """Base model named by the adapter; empty: none."""
    digest_in_work: "Future[str]"
    targets: str | tuple[str, ...]
    modules: Mapping[str, LowRank]
    """Matrices by the names of Hugging Face's modules."""
    prefix: str = ""
    """Beginning of those names that the folder leaves out."""

    @property
    def digest(self) -> str:
        """Digest of both files. Waits for it."""
        return self.digest_in_work.result()

    @property
    def has_effect(self) -> bool:
        """Whether any module adds anything but zeros."""
        return any(bool(one.a.any()) and bool(one.b.any()) and one.scale for one in self.modules.values())

    def refused(self, what: str) -> ConfigurationError:
        """Error that names the adapter and the model that it was made for."""
        of = f" (made for {self.base})" if self.base else ""
        return ConfigurationError(f"{self.given}{of}: {what}")

    def misses(self, known: Iterable[str]) -> list[str]:
        """Modules among `known` that the adapter's targets name and that it has no tensors of."""
        missing = (name for name in known if name not in self.modules)
        return sorted(name for name in missing if _matches(self.given, self.targets, name.removeprefix(self.prefix)))

    def below(self, prefix: str) -> "AdapterFolder":
        """The same, with this before each module's name."""
        return replace(self, prefix=prefix, modules={prefix + name: one for name, one in self.modules.items()})


def read_adapter(name: str, path: str) -> AdapterFolder:
    """Reads and checks a folder. Raises `ConfigurationError` with the adapter's name and the fault."""
    check_adapter_name(name)
    given = described(name, path)
    config_file, weights_file = files_in(given, path)
    config_bytes = _read(given, config_file)
    config = _object(given, config_bytes)
    _check_fields(given, config)
    weights, digest = _read_weights(given, weights_file, config_bytes)
    targets = config.get("target_modules")
    found = AdapterFolder(
        given=given,
        base=str(config.get("base_model_name_or_path") or "")[:_MAX_SHOWN],
        digest_in_work=digest,
        targets=targets if isinstance(targets, str) else tuple(targets or ()),
        modules=_modules(given, config, weights_file, weights),
    )
    if strangers := sorted(name for name in found.modules if not _matches(given, found.targets, name)):
        raise found.refused(f"it has tensors of {strangers[0]}, which its target_modules do not name")
    return found


def _read(given: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(given, error) from error


def _read_weights(given: str, path: Path, config: bytes) -> tuple[memoryview, "Future[str]"]:
    """The content of a file, and the digest of both files, which a thread computes meanwhile from the same bytes."""
    pieces = SimpleQueue[memoryview | None]()
    beside = ThreadPoolExecutor(1, thread_name_prefix="digest")
    try:
        digest = beside.submit(digest_of, [config], iter(pieces.get, None))
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            content, first = memoryview(mapped_memory(size))[:size], 0
            while count := file.readinto(content[first : first + _PIECE]):
                pieces.put(content[first : first + count])
                first += count
        return content[:first], digest
    except OSError as error:
        raise unreadable(given, error) from error
    finally:
        pieces.put(None)
        beside.shutdown(wait=False)


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
    targets = config.get("target_modules")
    is_list = isinstance(targets, list) and all(isinstance(one, str) for one in targets)
    if not targets or not (isinstance(targets, str) or is_list):
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


def _modules(given: str, config: Mapping[str, Any], path: Path, weights: memoryview) -> dict[str, LowRank]:
    tensors = _tensors(given, path, weights)
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ConfigurationError(
                f"{given}: the tensor {name[:_MAX_SHOWN]} is not supported: only linears' lora_A and lora_B"
            )
        if not tensor.is_floating_point() or tensor.dim() != 2 or tensor.itemsize < 2:
            shape = tuple(tensor.shape)
            raise ConfigurationError(
                f"{given}: {name} is {tensor.dtype} {shape}, and must be a matrix of a floating type"
            )
        parts = pairs.setdefault(match["module"], {})
        if match["part"] in parts:
            raise ConfigurationError(f"{given}: {match['module']} has lora_{match['part']} twice")
        parts[match["part"]] = tensor
    if not pairs:
        raise ConfigurationError(f"{given}: {WEIGHTS} has no tensors")
    if (odd := _first_not_finite(tensors, weights)) is not None:
        raise ConfigurationError(f"{given}: {odd} has a NaN or an infinity")
    return {module: _low_rank(given, config, module, parts) for module, parts in sorted(pairs.items())}


def _tensors(given: str, path: Path, weights: memoryview) -> dict[str, Tensor]:
    """Views of a file's content, by name."""
    try:
        return {name: _view(name, weights, entry) for name, entry in read_tensors(path, weights).items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError, struct.error) as error:
        raise ConfigurationError(f"{given}: {WEIGHTS} is not a safetensors file, or is cut short ({error})") from error


def _first_not_finite(tensors: Mapping[str, Tensor], weights: memoryview) -> str | None:
    """Name of a tensor that has a NaN or an infinity, as by `not_finite`; those of one type are looked at together."""
    if len(dtypes := {tensor.dtype for tensor in tensors.values()}) == 1:
        content = weights[len(weights) - sum(tensor.nbytes for tensor in tensors.values()) :]
        if not content or not_finite({"": torch.frombuffer(content, dtype=dtypes.pop())}) is None:
            return None
    return not_finite(tensors)


def _view(name: str, weights: memoryview, entry: StoredTensor) -> Tensor:
    dtype, num_bytes = DTYPES[entry.kind], entry.end - entry.first
    if num_bytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    numbers = torch.frombuffer(weights, dtype=dtype, count=num_bytes // dtype.itemsize, offset=entry.first)
    if num_bytes % dtype.itemsize:
        raise ValueError(f"{name} of {entry.kind} has {num_bytes} bytes")
    return numbers.view(entry.shape)


def _low_rank(given: str, config: Mapping[str, Any], module: str, parts: Mapping[str, Tensor]) -> LowRank:
    for part in "AB":
        if part not in parts:
            raise ConfigurationError(f"{given}: {module} has no lora_{part}")
    a, b = parts["A"], parts["B"]
    rank, alpha = (
        _number(given, config, module, *names) for names in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern"))
    )
    if rank != int(rank) or not 1 <= rank <= MAX_RANK:
        raise ConfigurationError(
            f"{given}: {module} has rank {rank:g}, and must have a whole number from 1 to {MAX_RANK}"
        )
    if a.shape[0] != rank or b.shape[1] != rank:
        raise ConfigurationError(
            f"{given}: {module} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}, and {CONFIG} says "
            f"rank {rank:g}"
        )
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    if not scale:
        raise ConfigurationError(f"{given}: {module} has lora_alpha = {alpha:g}, by which nothing would be added")
    return LowRank(a=_of_a_read_type(a), b=_of_a_read_type(b), scale=scale)


def _of_a_read_type(matrix: Tensor) -> Tensor:
    return matrix.float() if matrix.dtype == torch.float64 else matrix


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
    return any(module == one or module.endswith(f".{one}") for one in targets)

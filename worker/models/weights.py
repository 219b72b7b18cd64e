"""Weights and configs of models: from a local Hugging Face folder, from the hub, or from a seeded generator. A
checkpoint is memory-mapped: nothing is read until a rank takes its slices, and all ranks of a machine share the page
cache.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from holdfast.worker.config import ModelConfig
from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.models.checks import (
    OTHER_ENGINE,
    check_config,
    check_known,
    check_loaded,
    check_num_layers,
    first_line,
)
from holdfast.worker.models.formats.gguf_folder import hf_folder, is_gguf, tokenizer_reason
from holdfast.worker.models.text_model import holds_text_model, key_mapping, served_config, text_name
from holdfast.worker.models.weight_files import check_folder, from_hub, num_tensors
from holdfast.worker.settings import DTYPE_SPELLINGS

ATTENTION: Final = "holdfast_paged"
"""The name under which `model.py` registers the paged attention with transformers."""

DUMMY_STD: Final = 0.02  # standard deviation, initializer_range of most Hugging Face models

NO_OVERRIDES: Final[Mapping[str, Any]] = MappingProxyType({})

_SPELLINGS: Final = {**DTYPE_SPELLINGS, "float64": "float32", "double": "float32"}
"""Spellings of dtypes in config.json, with the dtype that is served."""

_LONGEST_NAME: Final = 255
"""Bytes of the name of a file or folder."""

_SMALL_FILES: Final = ("*.json", "*.model", "*.txt", "*.jinja")
_DUPLICATES: Final = ["original/*", "consolidated*"]
"""Some publishers add the weights once more in another format."""

_IMPOSSIBLE: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions of transformers and torch for a config that no model can be built of: there is no common class."""

_BUILDING = threading.Lock()
"""Transformers patches torch while it builds a model: ranks that are threads of one process take turns."""


class WeightSource(Protocol):
    """Gives the whole of a parameter: `parameter` is the one in the built model, `name` its first name there."""

    def __call__(self, name: str, parameter: Tensor) -> Tensor: ...


def model_folder(config: ModelConfig, with_weights: bool = True) -> Path:
    """Like `resolve_model`, for the served model."""
    return resolve_model(config.model, with_weights, revision=config.revision, download_dir=config.download_dir)


def tokenizer_folder(config: ModelConfig, folder: Path) -> Path:
    """Folder of the tokenizer: the model's `folder`, unless a setting says otherwise."""
    if config.tokenizer is None:
        return folder
    return resolve_model(
        config.tokenizer, False, "model.tokenizer", needs="tokenizer.json", download_dir=config.download_dir
    )


def resolve_model(
    model: str,
    with_weights: bool = True,
    setting: str = "model.model",
    *,
    needs: str = "config.json",
    revision: str | None = None,
    download_dir: str | None = None,
) -> Path:
    """The folder of a model: `model` itself, the folder made from a GGUF file, or the download of a hub id.
    The file `needs` must be in it, and its content must be readable.

    Raises `ConfigurationError`, naming the setting that `model` is the value of.
    """
    folder, given = Path(model).expanduser(), f"{setting} = {model!r}"
    if len(os.fsencode(folder.name)) > _LONGEST_NAME:
        raise ConfigurationError(f"{given[:_LONGEST_NAME]}...: a name of more than {_LONGEST_NAME} bytes")
    if folder.is_dir() or folder.is_file():
        folder = hf_folder(folder, given)
        check_folder(folder, given, with_weights=with_weights)
        if not (folder / needs).is_file():
            reason = tokenizer_reason(folder)
            raise ConfigurationError(f"{given}: {f'the file {reason}' if reason else f'the folder has no {needs}'}")
        return folder
    if folder.is_absolute() or model.startswith((".", "~")) or is_gguf(folder):
        raise ConfigurationError(f"{given}: there is no such {'file' if is_gguf(folder) else 'folder'}")
    wanted = [*_SMALL_FILES, "*.safetensors"] if with_weights else _SMALL_FILES
    folder = from_hub(given, model, wanted, ignore_patterns=_DUPLICATES, revision=revision, cache_dir=download_dir)
    check_folder(folder, f"{setting} = {model!r}", with_weights=with_weights)
    return folder


def read_config(folder: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> Any:
    """The checked Hugging Face config of a folder, with entries replaced. Raises `UnsupportedModelError` where a gate
    refuses it, and `ConfigurationError` for an override that it does not know.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    written = read_json(folder / "config.json")
    raw = {**served_config(written, folder), **overrides}
    model_type = str(raw.get("model_type"))
    check_known(model_type)
    dtype = _written_dtype(raw)
    replaced = {**overrides, **({} if dtype is None else {"dtype": dtype})}
    try:
        if model_type != written.get("model_type"):
            config, unknown = CONFIG_MAPPING[model_type].from_dict(raw, return_unused_kwargs=True, **replaced)
        else:
            config, unknown = AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True, return_unused_kwargs=True, **replaced
            )
    except Exception as error:  # unknown types, remote code and impossible values: transformers has no common class
        reason = f"transformers cannot read its config ({first_line(error)})"
        way_out = "Code that comes with a checkpoint is never run; serve a model that transformers knows by itself"
        raise UnsupportedModelError(model_type, reason, way_out) from error
    if unknown := sorted(unknown.keys() & overrides.keys()):
        raise ConfigurationError(f"model.hf_overrides = {unknown}: a config of type {model_type} has no such entries")
    if isinstance(config.dtype, str):
        config.dtype = getattr(torch, config.dtype)
    check_config(config)
    return config


def torch_dtype(raw: Mapping[str, Any]) -> torch.dtype | None:
    """The type that a config.json names; None where it names none.

    Raises `ConfigurationError` for a dtype that no model is served in.
    """
    name = _written_dtype(raw)
    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
    return dtype


def _written_dtype(raw: Mapping[str, Any]) -> str | None:
    """The type that a config.json names, as torch spells it; None where it names none.

    Raises `ConfigurationError` for a dtype that no model is served in.
    """
    key = "dtype" if raw.get("dtype") is not None else "torch_dtype"
    written = raw.get(key)
    if written in (None, "auto"):
        return None if written is None else "float32"
    dtype = _SPELLINGS.get(str(written).removeprefix("torch."))
    if dtype is None:
        raise ConfigurationError(
            f"config.json: {key} = {written!r}: models are served in {', '.join(sorted(set(_SPELLINGS.values())))}; "
            f"fetch the file again, or replace the entry: model.hf_overrides = {{'dtype': 'bfloat16'}}"
        )
    return dtype


def load_checkpoint(folder: Path, config: Any) -> Any:
    """The whole model in the checkpoint's own dtype, its parameters views of the mapped files.

    Raises `UnsupportedModelError` if files and model do not fit.
    """
    from transformers import AutoModelForCausalLM

    is_text = holds_text_model(read_json(folder / "config.json"))
    check_num_layers(config, num_tensors(folder))
    with _BUILDING, in_silence():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype="auto",
                attn_implementation=ATTENTION,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
                key_mapping=key_mapping() if is_text else None,
            )
        except KeyError as error:
            raise _unknown_entry(config, error) from error
        except _IMPOSSIBLE as error:
            reason = f"transformers cannot load it ({first_line(error)})"
            way_out = "Check that the folder has complete *.safetensors of a causal language model"
            raise UnsupportedModelError(config.model_type, reason, way_out) from error
    unexpected = [name for name in info["unexpected_keys"] if not is_text or text_name(name) is not None]
    check_loaded(config.model_type, info["missing_keys"], unexpected, info["mismatched_keys"])
    return _ready(model)


def _unknown_entry(config: Any, error: KeyError) -> UnsupportedModelError:
    """A name that a table of transformers does not have: that of our attention, or one out of config.json."""
    if ATTENTION in str(error):
        reason = "its modeling code does not accept an attention function"
        return UnsupportedModelError(config.model_type, reason, OTHER_ENGINE)
    reason = f"transformers does not know what its config.json names ({first_line(error)[:200]})"
    return UnsupportedModelError(config.model_type, reason, "Fetch the file again, or replace the entry")


def build_hf_model(config: Any) -> Any:
    """The model without weights: parameters on the meta device, buffers real."""
    from transformers import AutoModelForCausalLM

    with _BUILDING, _parameters_on_meta():
        try:
            model = AutoModelForCausalLM.from_config(
                config, dtype=config.dtype, attn_implementation=ATTENTION, trust_remote_code=False
            )
        except _IMPOSSIBLE as error:
            reason = f"transformers has no causal language model for it ({first_line(error)})"
            raise UnsupportedModelError(config.model_type, reason, "Serve a causal language model") from error
        model.tie_weights()
    return _ready(model)


def loaded_weights(name: str, parameter: Tensor) -> Tensor:
    """The source of a loaded checkpoint: the parameter is there already."""
    return parameter.detach()


class DummyWeights:
    """Random weights, the same on every rank: each parameter has its own generator, seeded by its name."""

    def __init__(self, seed: int, device: torch.device, std: float = DUMMY_STD) -> None:
        self._seed = seed
        self._device = device
        self._std = std

    def __call__(self, name: str, parameter: Tensor) -> Tensor:
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest))
        noise = torch.empty(parameter.shape, device=self._device).normal_(0.0, self._std, generator=generator)
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        return (noise + 1.0 if is_norm else noise).to(parameter.dtype)


def read_eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    """Tokens that end an output: by generation_config.json, else config.json, else the tokenizer's own end token."""
    generation = read_json(folder / "generation_config.json")
    found = {
        "generation_config.json": generation.get("eos_token_id"),
        "config.json": getattr(config, "eos_token_id", None),
    }
    for file, value in found.items():
        if value is not None:
            token_ids = value if isinstance(value, list) else [value]
            if not all(type(token_id) is int for token_id in token_ids):
                raise ConfigurationError(
                    f"{folder / file}: eos_token_id = {value!r}: must be a token id or a list of them; fetch it again"
                )
            return frozenset(token_ids)
    eos = read_json(folder / "tokenizer_config.json").get("eos_token")
    content = eos.get("content") if isinstance(eos, dict) else eos
    added = read_json(folder / "tokenizer.json").get("added_tokens", [])
    return frozenset(token["id"] for token in added if token["content"] == content)


def read_json(path: Path) -> dict[str, Any]:
    """Content of a file of JSON; empty if it is not there. Raises `ConfigurationError` if it is not JSON."""
    try:
        content = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _ready(model: Any) -> Any:
    return model.eval().requires_grad_(False)


@contextmanager
def in_silence() -> Iterator[None]:
    """Silences transformers' progress bar, which ignores ranks and counts mapped weights, and its table of missing and
    unexpected tensors, which `check_loaded` refuses.
    """
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters lose their storage as soon as a module takes them; buffers (rotary frequencies) stay computed.

    Building on the meta device as a whole would lose the buffers that no checkpoint has. Modules that other threads
    make meanwhile are left alone.
    """
    register, builder = nn.Module.register_parameter, threading.get_ident()

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta and threading.get_ident() == builder:
            register(module, name, nn.Parameter(parameter.to("meta"), requires_grad=False))

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]

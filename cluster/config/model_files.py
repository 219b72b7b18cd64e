"""Checks of a model's files before anything is loaded: a wrong folder, hub id or `--tp` is found at once.

It needs no torch. Errors that only loading can find are reported by loading.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from holdfast.cluster.bundled_model.bundled_model import located
from holdfast.cluster.config.config import HoldfastConfig
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.executors.layout_arithmetic import uneven_shares, uneven_shares_notice
from holdfast.worker.models import weight_files
from holdfast.worker.models.checkpoint_scheme import check_quantization, quantization_of
from holdfast.worker.models.checks import check_heads, check_kv_cache_dtype
from holdfast.worker.models.coded_bytes import memory_of_weights
from holdfast.worker.models.formats.gguf_folder import hf_folder, is_gguf, tokenizer_reason
from holdfast.worker.models.formats.quantization_scheme import read_scheme
from holdfast.worker.models.text_model import served_config
from holdfast.worker.models.weight_files import check_folder
from holdfast.worker.process_memory import readable_bytes

_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WAY_OUT: Final = (
    "give a Hugging Face folder with config.json, tokenizer.json and *.safetensors, a GGUF file, a hub id, or demo"
)


def check_files(config: HoldfastConfig) -> None:
    """Refuses a model that cannot be served, by its name, its folder and its config. Asks no network.

    Raises `ConfigurationError` and `UnsupportedModelError`.
    """
    check_kv_cache_dtype(config.worker, config.model.device)
    for setting, name in _names(config):
        _check_name(setting, name)
    folder = local_folder(config)
    if folder is None:
        return
    given = f"model.model = {config.model.model!r}"
    is_dummy = config.model.load_format == "dummy"
    check_folder(folder, given, with_weights=not is_dummy)
    hf_config = _read_config(folder, given)
    if not is_dummy and not weight_files.weight_files(folder):
        others = " (PyTorch's *.bin are not read)" if _has_other_weights(folder) else ""
        raise ConfigurationError(f"{given}: the folder has no *.safetensors{others}; {_WAY_OUT}")
    if config.model.tokenizer is None and (reason := tokenizer_reason(folder)) is not None:
        raise ConfigurationError(f"{given}: the file {reason}; name a tokenizer by --tokenizer")
    if config.model.tokenizer is None and not (folder / "tokenizer.json").is_file():
        raise ConfigurationError(f"{given}: the folder has no tokenizer.json; add it, or name another by --tokenizer")
    check_quantization(folder, config.model.quantization)
    _check_config(config, hf_config)


def check_hub(config: HoldfastConfig) -> None:
    """Asks the hub for the config of a model that is not here, unless it was downloaded before.

    Raises `ConfigurationError` for an invalid hub id, and for a tensor-parallel size that does not fit.
    """
    if local_folder(config) is not None:
        return
    hub_id = located(config.worker).model.model
    given = f"model.model = {hub_id!r}"
    model = config.model
    folder = weight_files.from_hub(
        given, hub_id, ["config.json"], revision=model.revision, cache_dir=model.download_dir
    )
    _check_config(config, _read_config(folder, given))


def local_folder(config: HoldfastConfig) -> Path | None:
    """Folder of the model on this machine, or the folder made from a GGUF file here; None: the model is on the hub.

    Raises `ConfigurationError` for a GGUF file that cannot be served.
    """
    path = local_path(config)
    return None if path is None else hf_folder(path, f"model.model = {config.model.model!r}")


def local_path(config: HoldfastConfig) -> Path | None:
    """The folder or file of a model on this machine; None: it is the hub's."""
    path = Path(located(config.worker).model.model).expanduser()
    return path if path.exists() else None


def uneven_heads(config: HoldfastConfig) -> str | None:
    """The cost of heads that ranks cannot share evenly, for a model on this machine; None if they can."""
    folder = local_folder(config)
    found = {} if folder is None else _read_config(folder, config.model.model)
    heads = found.get("num_attention_heads")
    kv_heads, size = found.get("num_key_value_heads") or heads, config.parallel.tensor_parallel_size
    if not (isinstance(heads, int) and isinstance(kv_heads, int)) or uneven_shares(heads, kv_heads, size) is None:
        return None
    return uneven_shares_notice(heads, kv_heads, size)


def weight_bytes(config: HoldfastConfig) -> int:
    """Memory for the weights of a model that lies here, as they are served; 0 of others."""
    folder = local_folder(config)
    if folder is None or config.model.load_format == "dummy":
        return 0
    return memory_of_weights(config.model, folder, "cuda" if config.model.device == "cuda" else "cpu")


def weights_notice(config: HoldfastConfig) -> str | None:
    """Quantization scheme and memory of a local model's weights, in words; None for other models."""
    folder = local_folder(config)
    if folder is None or config.model.load_format == "dummy":
        return None
    words = quantization_of(folder, config.model.quantization)
    return f"quantization {words}, {readable_bytes(weight_bytes(config))} in memory"


def _names(config: HoldfastConfig) -> list[tuple[str, str]]:
    worker = located(config.worker)
    draft = worker.speculation.draft_model if worker.speculation.speculative == "draft" else None
    others = {"model.tokenizer": worker.model.tokenizer, "speculation.draft_model": draft}
    return [("model.model", worker.model.model), *((setting, name) for setting, name in others.items() if name)]


def _check_name(setting: str, name: str) -> None:
    path = Path(name).expanduser()
    if path.exists():
        hf_folder(path, f"{setting} = {name!r}")
        return
    if name.startswith(("/", ".", "~")) or is_gguf(path):
        raise ConfigurationError(f"{setting} = {name!r}: there is no such {'file' if is_gguf(path) else 'folder'}")
    if _HUB_ID.fullmatch(name) is None:
        raise ConfigurationError(
            f"{setting} = {name!r}: neither a folder on this machine nor a Hugging Face hub id; {_WAY_OUT}"
        )


def _read_config(folder: Path, given: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"{given}: the folder has no config.json; {_WAY_OUT}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{given}: config.json cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{given}: config.json is not a JSON object")
    return served_config(found, folder)


def _check_config(config: HoldfastConfig, hf_config: Mapping[str, Any]) -> None:
    found = SimpleNamespace(**{"model_type": "?", **hf_config})
    if config.model.load_format != "dummy":
        read_scheme(hf_config)
    if isinstance(hf_config.get("num_attention_heads"), int):
        may_be_uneven = config.model.executor != "hf" and config.model.device != "cuda"  # loading sees the rest
        check_heads(found, config.parallel.tensor_parallel_size, may_be_uneven=may_be_uneven)
    check_kv_cache_dtype(config.worker, config.model.device, found)


def _has_other_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.pth"))

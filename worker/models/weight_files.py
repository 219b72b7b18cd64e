"""Sizes of a checkpoint's weight files: what its weights will take in memory, from the files' headers alone.

It needs no torch, so that a command can look before anything is started.
"""

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from holdfast.worker.config import Quantization
from holdfast.worker.errors import ConfigurationError, UnsupportedModelError
from holdfast.worker.models.formats.gguf_folder import gguf_files, is_made_of_gguf, read_index
from holdfast.worker.models.formats.quantization_rule import is_head, is_table
from holdfast.worker.models.formats.quantization_scheme import QuantizationScheme, num_weights, read_scheme
from holdfast.worker.models.safetensors_header import INDEX, checked_header, read_header
from holdfast.worker.models.text_model import name_in_model, served_config

_DUPLICATES: Final = "consolidated"
"""Some publishers add the weights once more in another format, under names that begin so."""

_FLOATS: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number in the types that loading converts from, by their names in a header."""

_SERVED: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def from_hub(given: str, hub_id: str, wanted: Sequence[str], **options: Any) -> Path:
    """Folder of a model's files of the `wanted` names, from the hub unless they were downloaded before. `given` is the
    setting that names the model, `options` are the hub client's own.

    Raises `ConfigurationError` for a model that the hub does not give.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(wanted), **options))
    except Exception as error:  # the hub client raises whatever its HTTP library does
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise ConfigurationError(
            f"{given} is neither a local folder nor a model that the hub would give: {reason}. Is the name right, is "
            "this machine online, and does the model need HF_TOKEN? Or give a folder with config.json, tokenizer.json "
            "and *.safetensors, or a GGUF file"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """The files that loading reads."""
    if is_made_of_gguf(folder):
        return gguf_files(folder)
    index = folder / INDEX
    if index.is_file():
        try:
            named = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            named = set()  # loading reports its fault
        if found := [folder / name for name in sorted(named) if _is_file(folder / name)]:
            return found
    return [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith(_DUPLICATES)]


def weight_bytes(folder: Path, dtype: str = "auto", quantization: Quantization | None = None) -> int:
    """Memory that the weights of all ranks take together, once they are of the type that is served (`model.dtype`).

    `quantization` at load gives a model whose head is its table a separate head.
    """
    served = _checkpoint_dtype(folder) if dtype == "auto" else dtype
    if is_made_of_gguf(folder):
        return sum(math.prod(tensor.shape) for tensor in read_index(folder)) * _SERVED[served]
    scheme, files = _scheme(folder), weight_files(folder)
    return sum(_bytes_of(path, served, scheme) for path in files) + (_head_bytes(files, served) if quantization else 0)


def num_tensors(folder: Path) -> int:
    """Tensors of all files, of other models beside the text model too."""
    if is_made_of_gguf(folder):
        return len(list(read_index(folder)))
    return sum(len(read_header(path)[0]) for path in weight_files(folder))


def served_dtype(folder: Path, dtype: str = "auto") -> str:
    """Type that is served, by its name."""
    return _checkpoint_dtype(folder) if dtype == "auto" else dtype


def served_itemsize(folder: Path, dtype: str = "auto") -> int:
    """Bytes of a number of the type that is served."""
    return _SERVED.get(served_dtype(folder, dtype), _SERVED["float32"])


def _head_bytes(files: Sequence[Path], dtype: str) -> int:
    """Bytes of a head that the files do not have and that is made of the table; 0 if they have one."""
    try:
        entries = {name: entry for path in files for name, entry in read_header(path)[0].items()}
        table = next((math.prod(entry["shape"]) for name, entry in entries.items() if is_table(name)), 0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        return 0
    return 0 if any(map(is_head, entries)) else table * _SERVED.get(dtype, _SERVED["float32"])


def _scheme(folder: Path) -> QuantizationScheme | None:
    """None also for an unsupported one: a gate refuses it."""
    try:
        return read_scheme(served_config(read_object(folder / "config.json"), folder))
    except UnsupportedModelError:
        return None


def _checkpoint_dtype(folder: Path) -> str:
    """Dtype in config.json: files may hold another one, which loading converts."""
    config = served_config(read_object(folder / "config.json"), folder)
    return str(config.get("dtype", config.get("torch_dtype", "")))


def _bytes_of(path: Path, dtype: str, scheme: QuantizationScheme | None) -> int:
    """Bytes by the header; for a file whose header cannot be read, its size."""
    try:
        if scheme is not None:
            header, _ = read_header(path)
            named = name_in_model(path.parent)
            weights = (
                num_weights(scheme, name, one["dtype"], one["shape"])
                for stored, one in header.items()
                if (name := named(stored)) is not None
            )
            return int(sum(weights)) * _SERVED.get(dtype, _SERVED["float32"])
        return sum(_served_bytes(stored, num_bytes, dtype) for stored, num_bytes in _tensors(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        return path.stat().st_size


def _tensors(path: Path) -> Iterator[tuple[str, int]]:
    """Type and bytes of each tensor of a file that the model has."""
    header, _ = read_header(path)
    named = name_in_model(path.parent)
    for name, entry in header.items():
        if named(name) is None:
            continue
        first, end = entry["data_offsets"]
        if not 0 <= first <= end:
            raise ValueError(f"{path}: {name} lies from {first} to {end}")
        yield entry["dtype"], end - first


def _served_bytes(stored: str, num_bytes: int, dtype: str) -> int:
    if dtype not in _SERVED or stored not in _FLOATS:
        return num_bytes
    return num_bytes // _FLOATS[stored] * _SERVED[dtype]


_JSON_FILES: Final = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.json", INDEX),
)
_LARGE_JSON: Final = ("tokenizer.json",)
"""Megabytes, which are parsed once, by who uses them: looked at where they begin and end."""

_TEXT_FILES: Final = ("chat_template.jinja",)
_ADAPTER: Final = "adapter_config.json"
_ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"

_POINTER: Final = b"version https://git-lfs.github.com/spec/"
_FETCH: Final = "fetch it again"
_SHOWN: Final = 200
"""Characters of a name that an error shows."""

_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half of an escaped pair, or both."""

_ITEMSIZES: Final = _FLOATS | {
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
    **dict.fromkeys(("I64", "U64"), 8),
    **dict.fromkeys(("I32", "U32"), 4),
    **dict.fromkeys(("I16", "U16"), 2),
}
_READ_DTYPES: Final = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""Dtypes by their names in a header; loading converts them to the served dtype."""


def check_folder(folder: Path, given: str, *, with_weights: bool = True) -> None:
    """Refuses a folder with a file that nothing can be read of. `given` says where the folder was named.

    Raises `ConfigurationError` that names the file. Missing files are not checked here.
    """
    _check_no_adapter(folder, given)
    for path in (folder / name for name in (*_JSON_FILES, *_LARGE_JSON, *_TEXT_FILES)):
        if path.is_file():
            content = _content(path, given)
            if path.name in _JSON_FILES:
                _check_json(path, content, given)
            elif path.name in _TEXT_FILES:
                _check_text(path, content, given)
            elif path.name in _LARGE_JSON and not content.startswith(b"{"):
                raise _refused(given, path, "holds no JSON object")
            elif path.name in _LARGE_JSON and not content.endswith(b"}"):
                raise _refused(given, path, "is cut short")
    if not with_weights:
        return
    _check_shards(folder, given)
    is_quantized = "quantization_config" in served_config(
        read_object(folder / "config.json"), folder
    )  # whose tensors are checked when read
    files = [] if is_made_of_gguf(folder) else weight_files(folder)  # which was made from the checked files
    for path in files:
        _check_weights(path, given, check_dtypes=not is_quantized)
    _check_once(folder, files, given)


def _check_once(folder: Path, files: Sequence[Path], given: str) -> None:
    """No tensor of the model is in two files."""
    named, found = name_in_model(folder), dict[str, str]()
    for path in files:
        for name in filter(named, read_header(path)[0]):
            if name in found:
                raise ConfigurationError(
                    f"{given}: the tensor {name[:_SHOWN]} is in {found[name]} and in {path.name}; remove the file that "
                    "does not belong to the model"
                )
            found[name] = path.name


def _check_no_adapter(folder: Path, given: str) -> None:
    if not (folder / _ADAPTER).is_file():
        return
    weights = {path.name for path in weight_files(folder)}
    if (folder / "config.json").is_file() and weights != {_ADAPTER_WEIGHTS}:
        return
    base = read_object(folder / _ADAPTER).get("base_model_name_or_path")
    of = f" of {base}" if base else ""
    raise ConfigurationError(
        f"{given}: this is the folder of an adapter{of} (it has {_ADAPTER} and no weights of a model); "
        "give the folder of its model, and the adapter by --lora NAME=PATH"
    )


def _check_json(path: Path, content: bytes, given: str) -> None:
    try:
        found = json.loads(content.decode())
        if _SURROGATE.search(content):
            json.dumps(found, ensure_ascii=False).encode()  # raises UnicodeEncodeError for a lone surrogate
    except (ValueError, RecursionError) as error:
        raise _refused(given, path, f"is no JSON, or cut short ({error})") from error
    if not isinstance(found, dict):
        raise _refused(given, path, "holds no JSON object")


def _check_text(path: Path, content: bytes, given: str) -> None:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise _refused(given, path, f"is not in UTF-8 (byte {error.start}: {error.reason})") from error


def _content(path: Path, given: str) -> bytes:
    """Content without spaces at its ends."""
    try:
        content = path.read_bytes().strip()
    except OSError as error:
        raise _refused(given, path, f"cannot be read ({error.strerror})") from error
    if not content:
        raise _refused(given, path, "is empty")
    if content.startswith(_POINTER):
        raise _pointer(given, path)
    return content


def _check_shards(folder: Path, given: str) -> None:
    """All files that an index names are there."""
    named = read_object(folder / INDEX).get("weight_map")
    if not isinstance(named, Mapping):
        return
    for name in sorted({str(name) for name in named.values()}):
        if not _is_file(folder / name):
            raise ConfigurationError(f"{given}: {name[:_SHOWN]}, which {INDEX} names, is not there; {_FETCH}")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for any
        return False


def _check_weights(path: Path, given: str, *, check_dtypes: bool) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begins = file.read(len(_POINTER))
    except OSError as error:
        raise _refused(given, path, f"cannot be read ({error.strerror})") from error
    if size == 0:
        raise _refused(given, path, "is empty")
    if begins == _POINTER:
        raise _pointer(given, path)
    try:
        header, header_bytes = checked_header(path)
        ends = [int(entry["data_offsets"][1]) for entry in header.values()]
        dtypes = {name: (str(entry["dtype"]), len(entry["shape"])) for name, entry in header.items()}
        misplaced = _misplaced(header)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        RecursionError,
        struct.error,
    ) as error:
        raise _refused(given, path, "is not a safetensors file, or is cut short within its header") from error
    needed = header_bytes + max(ends, default=0)
    if size < needed:
        raise _refused(given, path, f"is cut short: {size} of {needed} bytes are there")
    if size > needed:
        raise _refused(given, path, f"has {size} bytes, where its header says {needed}")
    if misplaced is not None:
        raise _refused(given, path, f"has a header that does not fit: its place of {misplaced}")
    if check_dtypes:
        _check_dtypes(path, given, dtypes)


def _misplaced(header: Mapping[str, Any]) -> str | None:
    """The first tensor that does not begin where the one before it ends, or whose shape needs other bytes."""
    reached = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, end = entry["data_offsets"]
        itemsize = _ITEMSIZES.get(entry["dtype"])
        if first != reached or (itemsize is not None and end - first != math.prod(entry["shape"]) * itemsize):
            return name
        reached = end
    return None


def _check_dtypes(path: Path, given: str, dtypes: Mapping[str, tuple[str, int]]) -> None:
    """Whole numbers where weights should be are codes, whose scales nothing here reads. Masks and positions may be."""
    for name, (dtype, num_dims) in dtypes.items():
        is_weight = name.endswith(("weight", "_proj")) or (name.endswith("bias") and num_dims == 1)
        if is_weight and dtype not in _READ_DTYPES:
            raise ConfigurationError(
                f"{given}: {name} in {path.name} is of type {dtype}; supported types are "
                f"{', '.join(_READ_DTYPES)}; give the checkpoint that is not quantized"
            )


def read_object(path: Path) -> dict[str, Any]:
    """Object in a file of JSON; empty if it is not there or holds something else."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _refused(given: str, path: Path, what: str) -> ConfigurationError:
    return ConfigurationError(f"{given}: {path.name} {what}; {_FETCH}")


def _pointer(given: str, path: Path) -> ConfigurationError:
    return ConfigurationError(
        f"{given}: {path.name} is a git-lfs pointer, not the file itself; run `git lfs pull` in the folder"
    )


_SAMPLE_BYTES: Final = 64 * 2**10


def checkpoint_digest(folder: Path, overrides: Mapping[str, Any] | None = None) -> str:
    """A digest of the configuration, of its overrides, and of both ends of each file of weights, with names and sizes;
    12 digits.
    """
    digest = blake2b(json.dumps(overrides, sort_keys=True).encode() if overrides else b"", digest_size=6)
    for path in [folder / "config.json", *sorted([*folder.glob("*.safetensors"), *gguf_files(folder)])]:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def weights_stamp(folder: Path) -> str:
    """Names, sizes and times of change of the files of weights: of others, written later to the same place, it differs
    though the ends of the files, which `checkpoint_digest` reads, are the same.
    """
    found = [(path.name, path.stat()) for path in sorted([*folder.glob("*.safetensors"), *gguf_files(folder)])]
    return " ".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found)

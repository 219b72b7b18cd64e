"""Sizes of a checkpoint's weight files: what its weights will take in memory, from the files' headers alone.

It needs no torch, so that a command can look before anything is started. What may not live here: reading weights
(`weights.py`), and which share of them a rank keeps (`memory.py`).
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

INDEX: Final = "model.safetensors.index.json"
_DUPLICATES: Final = "consolidated"
"""Some publishers add the weights once more in a format of their own, under names that begin so."""

_FLOATS: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number in the types that loading converts from, by their names in a header."""

_SERVED: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_MAX_HEADER: Final = 100 * 2**20


def weight_files(folder: Path) -> list[Path]:
    """The files that loading reads."""
    index = folder / INDEX
    if index.is_file():
        try:
            named = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            named = set()  # loading says what is wrong with it
        if found := [folder / name for name in sorted(named) if (folder / name).is_file()]:
            return found
    return [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith(_DUPLICATES)]


def weight_bytes(folder: Path, dtype: str = "auto") -> int:
    """Memory that the weights of all ranks take together, once they are of the type that is served (`model.dtype`)."""
    served = _checkpoint_dtype(folder) if dtype == "auto" else dtype
    return sum(_bytes_of(path, served) for path in weight_files(folder))


def _checkpoint_dtype(folder: Path) -> str:
    """As config.json has it: files may hold another one, which loading converts."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return str(config.get("dtype", config.get("torch_dtype", "")))
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""


def _bytes_of(path: Path, dtype: str) -> int:
    """By the header; of a file whose header cannot be read, its size."""
    try:
        return sum(_served_bytes(stored, num_bytes, dtype) for stored, num_bytes in _tensors(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        return path.stat().st_size


def _tensors(path: Path) -> Iterator[tuple[str, int]]:
    """Type and bytes of each tensor of a file."""
    header, _ = read_header(path)
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        if not 0 <= first <= end:
            raise ValueError(f"{path}: {name} lies from {first} to {end}")
        yield entry["dtype"], end - first


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """What a safetensors file says of each of its tensors, and the bytes before their values.

    Raises `ValueError` and `struct.error` where there is no such header.
    """
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if not 0 < length <= _MAX_HEADER:
            raise ValueError(f"{path}: a header of {length} bytes")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def _served_bytes(stored: str, num_bytes: int, dtype: str) -> int:
    if dtype not in _SERVED or stored not in _FLOATS:
        return num_bytes
    return num_bytes // _FLOATS[stored] * _SERVED[dtype]

"""Headers of safetensors files: names, types and places of their tensors. Needs no torch."""

import json
import struct
from pathlib import Path
from typing import Any, Final

INDEX: Final = "model.safetensors.index.json"
"""The file that says in which of several files each tensor lies."""

_MAX_HEADER: Final = 100 * 2**20  # bytes, as in the safetensors library


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Header entries of a safetensors file's tensors, and the number of bytes before their values.

    Raises `ValueError` and `struct.error` where there is no such header.
    """
    content = _header_of(path)
    header = json.loads(content)
    header.pop("__metadata__", None)
    return header, 8 + len(content)


def checked_header(path: Path) -> tuple[dict[str, Any], int]:
    """The same for an unchecked file: every entry must follow the format, and occur once.

    Raises `ValueError`, and what else comes of JSON that is no header.
    """
    content = _header_of(path)
    header = json.loads(content.decode(), object_pairs_hook=_without_repeats)
    if not all(isinstance(text, str) for text in (header.pop("__metadata__", None) or {}).values()):
        raise ValueError(f"{path}: metadata that is no text")
    for name, entry in header.items():
        name.encode()  # half a surrogate pair is no name
        counts = (*entry["shape"], *entry["data_offsets"])
        if not isinstance(entry["dtype"], str) or not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"{path}: {name} has dtype {entry['dtype']!r} and numbers {counts}")
        if len(entry["data_offsets"]) != 2:
            raise ValueError(f"{path}: {name} lies from and to {entry['data_offsets']}")
    return header, 8 + len(content)


def _header_of(path: Path) -> bytes:
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if not 0 < length <= _MAX_HEADER:
            raise ValueError(f"{path}: a header of {length} bytes")
        content = file.read(length)
    if len(content) < length:
        raise ValueError(f"{path}: {len(content)} bytes of a header of {length}")
    return content


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found

"""Headers of safetensors files: names, types and places of their tensors. Needs no torch."""

import json
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

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
    return _checked(path, content), 8 + len(content)


def _checked(path: Path, content: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(content.decode(), object_pairs_hook=_without_repeats)
    if not all(isinstance(text, str) for text in (header.pop("__metadata__", None) or {}).values()):
        raise ValueError(f"{path}: metadata that is no text")
    for name, entry in header.items():
        name.encode()  # half a surrogate pair is no name
        counts = (*entry["shape"], *entry["data_offsets"])
        if not isinstance(entry["dtype"], str) or not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"{path}: {name} has dtype {entry['dtype']!r} and numbers {counts}")
        if len(entry["data_offsets"]) != 2:
            raise ValueError(f"{path}: {name} lies from and to {entry['data_offsets']}")
    return header


class StoredTensor(NamedTuple):
    """A tensor in the content of a file."""

    kind: str
    """Name of its type in the header."""
    shape: list[int]
    first: int
    """Place of its first byte in the content."""
    end: int


def read_tensors(path: Path, content: memoryview, size: int) -> dict[str, StoredTensor]:
    """The tensors in the content of a file of this size, of which the header is enough. They follow each other, from
    the header to the end, as the format has it.

    Raises `ValueError`, and what else comes of JSON that is no header.
    """
    length = _length(path, content[:8])
    header = _whole(path, header_bytes(content), length)
    begin = reached = 8 + len(header)
    found = {}
    for name, entry in sorted(_checked(path, header).items(), key=lambda item: item[1]["data_offsets"]):
        first, end = (begin + offset for offset in entry["data_offsets"])
        if first != reached or not first <= end <= size:
            raise ValueError(f"{name} lies at {first} to {end}, behind {reached}, in {size} bytes")
        found[name], reached = StoredTensor(entry["dtype"], entry["shape"], first, end), end
    if reached != size:
        raise ValueError(f"its tensors end at {reached}, and it has {size} bytes")
    return found


def header_end(content: memoryview) -> int:
    """Place behind the header in a file's content, of which the first bytes are enough."""
    return 8 + min(int.from_bytes(content[:8], "little"), _MAX_HEADER)


def header_bytes(content: memoryview) -> bytes:
    """The header in a file's content, or what there is of it."""
    return bytes(content[8 : header_end(content)])


def _header_of(path: Path) -> bytes:
    with open(path, "rb") as file:
        length = _length(path, file.read(8))
        return _whole(path, file.read(length), length)


def _length(path: Path, content: bytes | memoryview) -> int:
    (length,) = struct.unpack("<Q", content)
    if not 0 < length <= _MAX_HEADER:
        raise ValueError(f"{path}: a header of {length} bytes")
    return int(length)


def _whole(path: Path, content: bytes, length: int) -> bytes:
    if len(content) < length:
        raise ValueError(f"{path}: {len(content)} bytes of a header of {length}")
    return content


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found

"""Headers of safetensors files: names, types and places of their tensors. Needs no torch."""

import json
import struct
from pathlib import Path
from typing import Any, Final

INDEX: Final = "model.safetensors.index.json"
"""The file that says in which of several files each tensor lies."""

_MAX_HEADER: Final = 100 * 2**20


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Header entries of a safetensors file's tensors, and the number of bytes before their values.

    Raises `ValueError` and `struct.error` where there is no such header.
    """
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if not 0 < length <= _MAX_HEADER:
            raise ValueError(f"{path}: a header of {length} bytes")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length

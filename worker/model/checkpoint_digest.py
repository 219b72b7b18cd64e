"""Checkpoint digest: a short hash that names the weights in a folder, equal for equal copies on every machine.

It samples the files instead of reading gigabytes. What may not live here: tensors, or any meaning of the files.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

_SAMPLE_BYTES: Final = 64 * 2**10


def checkpoint_digest(folder: Path, overrides: Mapping[str, Any] | None = None) -> str:
    """A digest of the configuration, of what a setting overrides in it, and of both ends of each file of weights, with
    names and sizes; 12 digits.
    """
    digest = blake2b(json.dumps(overrides, sort_keys=True).encode() if overrides else b"", digest_size=6)
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()

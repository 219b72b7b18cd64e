"""Digest of a tokenizer's files: routers have one tokenizer for each model, so all versions of it must share it.

What may not live here: reading a tokenizer (`router/text/tokenizer.py`).
"""

import hashlib
import json
from pathlib import Path
from typing import Final

_WHOLE: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
_CONFIG: Final = "tokenizer_config.json"
_NOT_TOKENS: Final = ("chat_template", "model_max_length", "name_or_path", "transformers_version")
"""What of the configuration changes no token of a given text."""


def tokenizer_digest(folder: Path) -> str:
    """Equal for folders whose tokenizers give the same tokens, chat templates apart. 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name in _WHOLE:
        path = folder / name
        if path.is_file():
            digest.update(name.encode() + hashlib.sha256(path.read_bytes()).digest())
    config = folder / _CONFIG
    if config.is_file():
        known = {key: value for key, value in json.loads(config.read_text()).items() if key not in _NOT_TOKENS}
        digest.update(json.dumps(known, sort_keys=True).encode())
    return digest.hexdigest()[:16]

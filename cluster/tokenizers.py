"""Tokenizers of models as they lie on disk: in a Hugging Face folder, or in a GGUF file."""

from pathlib import Path

from holdfast.router.text.tokenizer import Tokenizer
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.models.formats.gguf_folder import hf_folder, tokenizer_reason


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a local folder or GGUF file. Raises `ConfigurationError` if it cannot be read."""
    found = Path(path)
    if not found.exists():
        return Tokenizer.load(path)
    folder = hf_folder(found, path)
    if (reason := tokenizer_reason(folder)) is not None:
        raise ConfigurationError(f"{path}: the file {reason}; name a tokenizer by --tokenizer")
    return Tokenizer.load(str(folder))

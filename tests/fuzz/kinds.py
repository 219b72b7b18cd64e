"""The kinds of input that are fuzzed, each with the module that reads it.

A module of `tests/fuzz/targets/` has `opened()`: a context manager whose value takes the bytes of one input, and raises
if the product does not do with them what it documents.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
CORPUS: Final = FOLDER / "corpus"

KINDS: Final = (
    "protobuf",
    "json_bodies",
    "http1",
    "http2",
    "resumption",
    "key_files",
    "configuration",
    "weight_files",
    "gguf_files",
    "native",
)

MAX_BYTES: Final[dict[str, int]] = {"native": 512, "gguf_files": 8192}
"""Of an input of this kind; of others `DEFAULT_MAX_BYTES`."""
DEFAULT_MAX_BYTES: Final = 4096


def opened(kind: str) -> AbstractContextManager[Callable[[bytes], None]]:
    """Whatever reads inputs of a kind."""
    target: AbstractContextManager[Callable[[bytes], None]] = import_module(f"tests.fuzz.targets.{kind}").opened()
    return target


def corpus(kind: str) -> list[Path]:
    """The inputs that are kept in the repository."""
    return sorted((CORPUS / kind).iterdir())

"""Adapters as routers and replicas name them: a name, a digest of the content, and a folder. Plain data, no torch."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.worker.errors import ConfigurationError

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"

_PICKLES: Final = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "pytorch_model.bin")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]*(/[A-Za-z0-9][A-Za-z0-9._:@+-]*)*")
_MAX_NAME: Final = 200  # characters
_PIECE: Final = 1 << 20  # bytes read at a time


class Adapter(NamedTuple):
    """A low-rank adapter that requests run with. Its content is what `digest` says, wherever it lies."""

    name: str
    """The name that clients use as a model's."""
    digest: str
    """Hexadecimal digest of its files."""
    path: str
    """Folder to read it from."""

    @classmethod
    def in_folder(cls, name: str, path: str) -> "Adapter":
        """The adapter that lies in a folder now. Reads all of it. Raises `ConfigurationError`."""
        check_adapter_name(name)
        folder = Path(path).expanduser().absolute()
        given = f"adapter {name} in {path}"
        check_weights_are_there(given, folder)
        try:
            return cls(name, digest_of(_pieces(folder / CONFIG), _pieces(folder / WEIGHTS)), str(folder))
        except OSError as error:
            raise ConfigurationError(f"{given}: {error.filename} cannot be read ({error.strerror})") from error

    @property
    def key(self) -> str:
        """Name of exactly this content."""
        return f"{self.name}@{self.digest}"


def check_adapter_name(name: str) -> None:
    """Raises `ConfigurationError` for an invalid name: empty, too long, or like a path."""
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name) or ".." in name:
        raise ConfigurationError(
            f"lora_name = {name[:_MAX_NAME]!r}: must be 1 to {_MAX_NAME} letters, digits, . _ : @ + -, in parts with / "
            f"between them; no part begins with a dot or has two in a row"
        )


def check_weights_are_there(given: str, folder: Path) -> None:
    """Raises `ConfigurationError` for a folder that has pickles in place of safetensors."""
    if not (folder / WEIGHTS).is_file() and (pickles := [one for one in _PICKLES if (folder / one).is_file()]):
        what = f"{pickles[0]} is a pickle, which may run any code when it is read"
        raise ConfigurationError(f"{given}: {what}; save the adapter as {WEIGHTS}")


def digest_of(config: Iterable[bytes], weights: Iterable[bytes]) -> str:
    """Digest of the content of both files, each in pieces."""
    whole = hashlib.sha256()
    for content in (config, weights):
        one = hashlib.sha256()
        for piece in content:
            one.update(piece)
        whole.update(one.digest())
    return whole.hexdigest()


def _pieces(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece

"""Adapters as routers and replicas name them: a name, a digest of the content, and a folder. Plain data, no torch."""

import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from blake3 import blake3

from holdfast.worker.errors import ConfigurationError

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"

_PICKLES: Final = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "pytorch_model.bin")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]*(/[A-Za-z0-9][A-Za-z0-9._:@+-]*)*")
_MAX_NAME: Final = 200  # characters
_MAX_SHOWN: Final = 300
"""Characters of a path in messages."""
_PIECE: Final = 1 << 20  # bytes read at a time
_LIMITS: Final = {CONFIG: 1 << 20, WEIGHTS: 8 << 30}
"""Largest files that are read, in bytes."""


class Adapter(NamedTuple):
    """A low-rank adapter that requests run with. Its content is what `digest` says, wherever it lies."""

    name: str
    """The name that clients use as a model's."""
    digest: str
    """Hexadecimal digest of its files."""
    path: str
    """Folder to read it from."""
    pinned: bool = False
    """Whether it stays resident in each replica. Touches no token."""

    @classmethod
    def in_folder(cls, name: str, path: str, *, pinned: bool = False) -> "Adapter":
        """The adapter that lies in a folder now. Reads all of it. Raises `ConfigurationError`."""
        check_adapter_name(name)
        given = described(name, path)
        config, weights = files_in(given, path)
        try:
            return cls(name, digest_of(_pieces(config), _pieces(weights)), str(config.parent), pinned)
        except OSError as error:
            raise unreadable(given, error) from error

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


def described(name: str, path: str) -> str:
    """An adapter's name and folder, for messages: of a path that is no Unicode, or long, what can be shown."""
    shown = path[:_MAX_SHOWN].encode(errors="backslashreplace").decode()
    return f"adapter {name} in {shown}{'...' if len(path) > _MAX_SHOWN else ''}"


def files_in(given: str, path: str) -> tuple[Path, Path]:
    """Config and weights in a folder, by absolute paths. `given`: as `described`.

    Raises `ConfigurationError` unless both are regular files that are not too large: anything else, such as a pipe,
    may be read for ever. Pickles in place of safetensors are named.
    """
    if not path:
        raise ConfigurationError(f"{given}the current folder: lora_path must not be empty")
    try:
        folder = _folder(given, path)
        _check_file(given, folder / CONFIG)
        if pickles := [one for one in _PICKLES if not (folder / WEIGHTS).exists() and (folder / one).exists()]:
            what = f"{pickles[0]} is a pickle, which may run any code when it is read"
            raise ConfigurationError(f"{given}: {what}; save the adapter as {WEIGHTS}")
        _check_file(given, folder / WEIGHTS)
    except OSError as error:
        raise unreadable(given, error) from error
    return folder / CONFIG, folder / WEIGHTS


def _folder(given: str, path: str) -> Path:
    try:
        folder = Path(path).expanduser().absolute()
        folder.stat()
    except (ValueError, RuntimeError) as error:  # a NUL, half a surrogate pair, a user that does not exist
        raise ConfigurationError(f"{given}: this is no path ({type(error).__name__})") from error
    return folder


def _check_file(given: str, path: Path) -> None:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ConfigurationError(f"{given}: {path.name} cannot be read (it is no regular file)")
    if found.st_size > _LIMITS[path.name]:
        raise ConfigurationError(f"{given}: {path.name} has {found.st_size} bytes; the maximum is {_LIMITS[path.name]}")


def unreadable(given: str, error: OSError) -> ConfigurationError:
    """Error for a file of an adapter that the system refuses to read."""
    return ConfigurationError(
        f"{given}: {Path(error.filename or '').name[:_MAX_SHOWN]} cannot be read ({error.strerror})"
    )


def digest_of(config: Iterable[bytes], weights: Iterable[bytes | memoryview]) -> str:
    """Digest of the content of both files, each in pieces: BLAKE3, so that none can be made to pass for another."""
    digest = DigestInWork(b"".join(config))
    for piece in weights:
        digest.add(piece)
    return digest.text


class DigestInWork:
    """Such a digest, of weights that come piece by piece."""

    def __init__(self, config: bytes) -> None:
        self._config = blake3(config)
        self._weights = blake3()

    def add(self, piece: bytes | memoryview) -> None:
        """Takes in the next piece."""
        self._weights.update(piece)

    @property
    def text(self) -> str:
        """Digest of what has been taken in, in hexadecimal."""
        return blake3(self._config.digest() + self._weights.digest()).hexdigest()


def _pieces(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece

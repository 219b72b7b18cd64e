"""Key file: the API keys of a file, read again and again. Requests find the new keys, running ones go on.

Its bytes are compared, not its dates: they change within one tick of a file system's clock, come back with a backup,
and say nothing of a file that becomes readable.

What may not live here: what keys may do (`api_keys.py`), who asks (`gate.py`).
"""

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from holdfast.router.security.api_keys import KeyRing
from holdfast.worker.errors import ConfigurationError

logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0


class KeyFile:
    """A `KeySource`. A file that cannot be read, or is half written, leaves the keys as they were; logged once."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """`clock` gives seconds. Raises `ConfigurationError` for a file that cannot be used."""
        self._path = path
        self._clock = clock
        self._content = _content(path)
        self._ring = _parsed(self._content, path)
        self._complaint = ""
        self._looked_at = clock()

    def ring(self) -> KeyRing:
        now = self._clock()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._look()
        return self._ring

    def _look(self) -> None:
        try:
            content = _content(self._path)
            if content != self._content:
                self._ring, self._content = _parsed(content, self._path), content
                logger.info("%s has changed: %d API keys", self._path, len(self._ring.keys))
        except ConfigurationError as error:
            if (complaint := str(error)) != self._complaint:
                self._complaint = complaint
                logger.error("the API keys stay as they were: %s", complaint)
        else:
            self._complaint = ""


def read_keys(path: Path) -> KeyRing:
    """Raises `ConfigurationError`."""
    return _parsed(_content(path), path)


def write_keys(path: Path, ring: KeyRing) -> None:
    """In one piece, readable by this user alone: whoever reads at the same time sees the old keys or the new ones."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # with mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(ring.written())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"security.api_keys = {str(path)!r}: cannot be read ({error})") from None


def _parsed(content: bytes, path: Path) -> KeyRing:
    try:
        return KeyRing.read(content.decode(), str(path))
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"security.api_keys = {str(path)!r}: cannot be read ({error})") from None

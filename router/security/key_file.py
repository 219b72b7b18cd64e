"""Key file: the API keys of a file, read again when it has changed. Requests find the new keys, running ones go on.

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
    """A `KeySource`. A file that cannot be read any more leaves the keys as they were, and is logged once."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """`clock` gives seconds. Raises `ConfigurationError` for a file that cannot be used."""
        self._path = path
        self._clock = clock
        self._stamp = _stamp(path)
        self._ring = read_keys(path)
        self._looked_at = clock()

    def ring(self) -> KeyRing:
        now = self._clock()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._look()
        return self._ring

    def _look(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._ring = read_keys(self._path)
        except ConfigurationError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("%s has changed: %d API keys", self._path, len(self._ring.keys))


def read_keys(path: Path) -> KeyRing:
    """Raises `ConfigurationError`."""
    try:
        return KeyRing.read(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"security.api_keys = {str(path)!r}: cannot be read ({error})") from None


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


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes when the file is written or replaced."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

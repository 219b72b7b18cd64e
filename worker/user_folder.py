"""Folder of this user's files that outlive a process: converted GGUF folders, compiled libraries, notes of running
clusters."""

import os
import tempfile
from pathlib import Path

from holdfast.worker.errors import ConfigurationError


def user_folder() -> Path:
    """`~/.cache/holdfast`; where there is no such place, as for a container's user without a home, a folder of this
    user's alone among the system's temporary ones. It is there when this returns.

    Raises `ConfigurationError` if that one is another's.
    """
    try:
        folder = Path.home() / ".cache" / "holdfast"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except (RuntimeError, OSError):  # no HOME and no line in passwd; a home that is not this user's
        pass
    folder = Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigurationError(
            f"{folder} cannot be made ({error.strerror}); set HOME to a folder of yours"
        ) from error
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigurationError(f"{folder} is not this user's alone; set HOME to a folder of yours")
    return folder

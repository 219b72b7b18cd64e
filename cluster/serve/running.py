"""Notes of clusters that run on a Ray of their own: where it is, and the token that lets one in. For their owner alone.

Such a Ray listens on loopback and answers only to who knows its token; the note is a file that no other user can read.
What may not live here: connecting (`local.py`), and what is done with a cluster (`models.py`).
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.worker.errors import ConfigurationError
from holdfast.worker.supervision.process_id import ProcessId
from holdfast.worker.user_folder import user_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """One cluster of this machine and this user."""

    namespace: str
    process: str
    """The process that started it, with its start time: the note of one that was killed is worth nothing."""
    ray_address: str
    token: str

    @property
    def pid(self) -> int:
        return ProcessId.parse(self.process).pid


@contextmanager
def noted(namespace: str, ray_address: str, token: str) -> Iterator[None]:
    """Keeps a note of this process's cluster for as long as the block lasts."""
    process = ProcessId.of(os.getpid())
    note = RunningCluster(namespace=namespace, process=str(process), ray_address=ray_address, token=token)
    path = _folder() / f"{process.pid}.json"
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(note), file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running_cluster(namespace: str, pid: int | None = None) -> RunningCluster:
    """The one cluster of this name; with a `pid`, that of the process. Raises `ConfigurationError`: what does run."""
    running = list(living())
    found = [one for one in running if one.namespace == namespace and pid in (None, one.pid)]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(f"{one.namespace!r} of process {one.pid}" for one in running) or "none"
    wanted = f"cluster.namespace = {namespace!r}" + ("" if pid is None else f", process {pid}")
    way_out = "choose one by --pid" if found else "for a cluster on a Ray that was there before, say --address"
    raise ConfigurationError(f"{wanted}: {len(found)} such clusters run here ({shown}); {way_out}")


def living() -> Iterator[RunningCluster]:
    """The notes whose processes live. Others are cleared away."""
    for path in sorted(_folder().glob("*.json")):
        with suppress(OSError, ValueError, TypeError):  # another process's, which may go at any time
            note = RunningCluster(**json.loads(path.read_text()))
            try:
                is_alive = str(ProcessId.of(note.pid)) == note.process
            except ProcessLookupError:
                is_alive = False
            if is_alive:
                yield note
            else:
                path.unlink(missing_ok=True)


def _folder() -> Path:
    """Of this user alone. Raises `ConfigurationError` if someone else could have put notes there."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "holdfast" if base else user_folder() / "running"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigurationError(f"{folder} must belong to this user, and be writable by no other")
    return folder

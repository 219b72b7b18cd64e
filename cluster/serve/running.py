"""Notes of clusters that run on Holdfast's own Ray: its address, and the token for access. For their owner alone.

Such a Ray listens on loopback and answers only callers with its token; no other user can read the note.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from holdfast.cluster.serve.reaper import descendants
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.replica.processes import ProcessId
from holdfast.worker.user_folder import user_folder

_STARTER: Final = b"holdfast.cluster.serve.life_starter"
"""Command line of the process that reapers and the lives below them are forked from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """One cluster of this machine and this user."""

    namespace: str
    process: str
    """The process that started it, with its start time: the note of a killed process is ignored."""
    ray_address: str
    token: str
    serve_pid: int = 0
    """The process that a user has started, which keeps the other one; 0 where it is the same."""
    ports: tuple[int, ...] = ()
    """Ports of the routers' gRPC APIs by the settings; 0 is any free one."""

    @property
    def pid(self) -> int:
        return ProcessId.parse(self.process).pid

    def is_below(self, pid: int) -> bool:
        """Whether this process started the cluster, or keeps the process that did."""
        return pid in (self.pid, self.serve_pid) or self.pid in descendants(pid)

    def __str__(self) -> str:
        ports = f", gRPC on port {' and '.join(map(str, self.ports))}" if any(self.ports) else ""
        return f"{self.namespace!r} of process {self.serve_pid or self.pid}{ports}"


@contextmanager
def noted(namespace: str, ray_address: str, token: str, ports: Sequence[int] = ()) -> Iterator[None]:
    """Keeps a note of this process's cluster for as long as the block lasts."""
    process = ProcessId.of(os.getpid())
    note = RunningCluster(
        namespace=namespace,
        process=str(process),
        ray_address=ray_address,
        token=token,
        serve_pid=_serve_pid(),
        ports=tuple(ports),
    )
    path = _folder() / f"{process.pid}.json"
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(note), file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running_cluster(namespace: str, pid: int | None = None) -> RunningCluster:
    """The one cluster of this name; with a `pid`, that of the process. Raises `ConfigurationError`, naming the clusters
    that run.
    """
    running = list(living())
    found = [one for one in running if one.namespace == namespace and (pid is None or one.is_below(pid))]
    if len(found) == 1:
        return found[0]
    shown = "; ".join(map(str, running)) or "none"
    wanted = f"cluster.namespace = {namespace!r}" + ("" if pid is None else f", process {pid}")
    way_out = "choose one by --pid" if found else "for a cluster on a Ray that was there before, say --address"
    raise ConfigurationError(f"{wanted}: {len(found)} such clusters run here ({shown}); {way_out}")


def living() -> Iterator[RunningCluster]:
    """The notes whose processes live. Others are cleared away."""
    for path in sorted(_folder().glob("*.json")):
        with suppress(OSError, ValueError, TypeError):  # another process's, which may go at any time
            read = json.loads(path.read_text())
            note = RunningCluster(**{**read, "ports": tuple(read.get("ports", ()))})
            if ProcessId.parse(note.process).is_alive:
                yield note
            else:
                path.unlink(missing_ok=True)


def _serve_pid() -> int:
    """The process of `holdfast serve`, if this one is kept by it: it keeps a reaper, which keeps this one."""
    try:
        reaper = os.getppid()
        if _STARTER not in Path(f"/proc/{reaper}/cmdline").read_bytes():
            return 0
        stat = Path(f"/proc/{reaper}/stat").read_bytes()
        return int(stat.rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _folder() -> Path:
    """Folder of this user alone. Raises `ConfigurationError` if someone else could have put notes there."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "holdfast" if base else user_folder() / "running"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigurationError(f"{folder} must belong to this user, and be writable by no other")
    return folder

"""Log files of a cluster on this machine: finds them in Ray's session folders, which name them by worker ids."""

import json
import logging
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, TypeAlias

from holdfast.worker.errors import ConfigurationError

RAY_VARIABLES: Final = ("RAY_TMPDIR", "TMPDIR")
"""Variables that say where Ray (2.60) puts its files; the first that is set counts."""

_HEAD_BYTES: Final = 1000
_ACTOR: Final = re.compile(
    r"^:actor_name:ServeReplica:(?P<app>[^:\s]+):(?:(?P<model>\S+):)?(?P<role>\w+)$", re.MULTILINE
)
_RANK: Final = re.compile(r"^:actor_name:RankActor$", re.MULTILINE)
_OURS: Final = {"Router": "router", "Replica": "replica", "Directory": "directory"}
_STAMP: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d+)?")


@dataclass(frozen=True, slots=True)
class LogFile:
    """Standard output or error of one process."""

    name: str
    """`router 4114`, `replica of demo 4212`, `rank 4328`: the number is the process."""
    path: Path
    namespace: str = ""
    """The cluster that the process is of; empty for a rank, whose log does not say."""


def ray_folder() -> Path:
    """Folder of the logs and sockets of Ray clusters that are started in this environment."""
    return Path(next((os.environ[name] for name in RAY_VARIABLES if os.environ.get(name)), "/tmp")) / "ray"


def session_folder(pid: int | None, base: Path | None = None) -> Path:
    """The logs of the cluster whose process is `pid`; None: those of Holdfast's last cluster, which may have ended.

    Raises `ConfigurationError` where there are none.
    """
    base = ray_folder() if base is None else base
    found = sorted(base.glob("session_[0-9]*" if pid is None else f"session_[0-9]*_{pid}"), reverse=True)
    for session in found:
        if any(log_files(session / "logs")):
            return session / "logs"
    which = "of a cluster" if pid is None else f"of process {pid}"
    raise ConfigurationError(
        f"there are no logs {which} in {base}; a cluster on another Ray (--address) has them on its own machines"
    )


def log_files(folder: Path) -> Iterator[LogFile]:
    """Log files of routers, replicas, ranks and the directory."""
    for path in sorted(folder.glob("worker-*.*")):
        with suppress(OSError), path.open("rb") as opened:  # Ray may take it away
            head = opened.read(_HEAD_BYTES).decode(errors="replace")
            if (found := _name(head)) is not None:
                name, namespace = found
                yield LogFile(f"{name} {path.stem.rpartition('-')[2]}", path, namespace)


def _name(head: str) -> tuple[str, str] | None:
    """Kind of process and the namespace of its cluster."""
    if _RANK.search(head):
        return "rank", ""
    actor = _ACTOR.search(head)
    if actor is None or actor["role"] not in _OURS:
        return None
    return _OURS[actor["role"]] + (f" of {actor['model']}" if actor["model"] else ""), actor["app"]


class Tail:
    """The new lines of one file. Ray's own marks are left out, and half a line waits for its end."""

    def __init__(self, file: LogFile) -> None:
        self.file = file
        self._offset = 0
        self._rest = b""
        self.stamp = ""
        """Timestamp of the last line that had one: lines without a timestamp belong to it."""

    def lines(self) -> list[tuple[str, str]]:
        """(time, line) of the lines since the last call."""
        with suppress(OSError), self.file.path.open("rb") as opened:
            opened.seek(self._offset)
            data = opened.read()
            self._offset += len(data)
            *whole, self._rest = (self._rest + data).split(b"\n")
            return list(self._stamped(line.decode(errors="replace").rstrip() for line in whole))
        return []

    def _stamped(self, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
        for line in lines:
            if line and not line.startswith((":job_id:", ":actor_name:", ":task_name:")):
                found = _STAMP.search(line[:60])
                self.stamp = found[0] if found else self.stamp
                yield self.stamp, line


def merged(tails: Sequence[Tail]) -> list[tuple[str, str]]:
    """(name, line) of all new lines, by time."""
    every = [(stamp, tail.file.name, line) for tail in tails for stamp, line in tail.lines()]
    every.sort(key=lambda one: one[0])  # stable: lines of one file stay in their order
    return [(name, line) for _, name, line in every]


FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"

_Info: TypeAlias = "tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]"


class DiscreetFormatter(logging.Formatter):
    """Writes the stack and the class of an exception and of those behind it."""

    def formatException(self, ei: _Info) -> str:
        error, parts = ei[1], list[str]()
        while error is not None and len(parts) < 10:
            stack = "".join(traceback.format_tb(error.__traceback__))
            parts.insert(0, f"{stack}{type(error).__module__}.{type(error).__qualname__}")
            error = error.__cause__ or error.__context__
        return "\n-- and then:\n".join(parts)


class JsonFormatter(DiscreetFormatter):
    """One object a line. A record's `details` (a mapping, such as the request's id) are among its fields."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(dict(getattr(record, "details", {})) | said, default=str)


def date_log_lines(log_format: Literal["text", "json"] = "text") -> None:
    """Writes warnings and errors of this process with the time from now on. Not for libraries: logs are their
    caller's.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else DiscreetFormatter(FORMAT))
    logging.basicConfig(handlers=[handler])

"""Inventory of what listens in a tree of processes: TCP, UDP and Unix sockets, read from /proc."""

import os
import re
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_LISTEN: Final = "0A"
_ACCEPTS: Final = 0x10000
"""Of a Unix socket's flags: it listens."""


@dataclass(frozen=True, slots=True)
class Listener:
    """One socket that others can reach."""

    process: str
    """Such as `raylet` or `Router`."""
    pid: int
    kind: str
    """`tcp`, `udp` or `unix`."""
    host: str
    """An IP address; of a Unix socket its file's name, with `@` in front of an abstract one."""
    port: int = 0


def listeners(processes: list[psutil.Process]) -> list[Listener]:
    """Everything that these processes listen on, once each."""
    owners = {}
    for process in processes:
        with suppress(psutil.Error, OSError):
            for descriptor in os.listdir(f"/proc/{process.pid}/fd"):
                with suppress(OSError):
                    owners.setdefault(os.readlink(f"/proc/{process.pid}/fd/{descriptor}"), process)
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for fields in _rows(table):
            owner = owners.get(f"socket:[{fields[9]}]")
            is_open = fields[3] == _LISTEN if table.startswith("tcp") else fields[2].endswith(":0000")
            if owner is not None and is_open:
                host, port = _address(fields[1])
                found.append(Listener(name_of(owner), owner.pid, table[:3], host, port))
    for fields in _rows("unix"):
        owner = owners.get(f"socket:[{fields[6]}]")
        if owner is not None and int(fields[3], 16) & _ACCEPTS:
            found.append(Listener(name_of(owner), owner.pid, "unix", fields[7] if len(fields) > 7 else ""))
    return found


def counted(found: list[Listener]) -> Counter[tuple[str, str, str]]:
    """How many sockets there are of each process, kind and address; of a Unix socket the last part of its name."""
    return Counter((one.process, one.kind, one.host.rpartition("/")[2]) for one in found)


def name_of(process: psutil.Process) -> str:
    """What a process is for, without what differs from start to start."""
    title = " ".join(process.cmdline())
    for name in ("Router", "Directory", "ServeController", "RankActor"):
        if re.search(rf"^ray::\S*\b{name}\b", title):
            return name
    if re.match(r"ray::ServeReplica:\S*:Replica", title):
        return "Replica"
    if title.startswith("ray::"):
        return "idle worker"
    return process.name() if process.name() in ("gcs_server", "raylet") else "starter"


def _rows(table: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]


def _address(text: str) -> tuple[str, int]:
    """The kernel writes addresses in words of its own byte order. IPv4 in IPv6 counts as IPv4."""
    host, port = text.split(":")
    words = bytes.fromhex(host)
    packed = b"".join(words[start : start + 4][::-1] for start in range(0, len(words), 4))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed).removeprefix("::ffff:"), int(port, 16)

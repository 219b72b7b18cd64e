"""Stand-in for one of a raylet's agents: it says that the agent serves on no port, and ends with the raylet.

    python -I -S agent_stand_in.py SERVICE,SERVICE... --session-dir=FOLDER --node-id=ID [OPTIONS OF THE AGENT]

A raylet waits until its agents have written their ports, and ends as soon as one of them ends. This process does
nothing that could end it.
"""

import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import Final

UNUSED_PORT: Final = -1
"""Port that Ray's own agents write for a service that they do not offer."""

IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The end of this process would be the end of the raylet, and that of the raylet is enough to end this one."""


def write_ports(services: Sequence[str], folder: str, node_id: str) -> None:
    """One file for each service, under the name that the raylet looks for. Each appears as a whole."""
    for service in services:
        path = os.path.join(folder, f"{service}_{node_id}")
        with open(f"{path}.new", "w") as file:
            file.write(str(UNUSED_PORT))
        os.replace(f"{path}.new", path)


def main(arguments: Sequence[str]) -> None:
    """Writes the ports, and returns when the parent has ended."""
    parent = os.getppid()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    options = dict(word[2:].split("=", 1) for word in arguments[1:] if word.startswith("--") and "=" in word)
    write_ports(arguments[0].split(","), options["session-dir"], options["node-id"])
    try:
        end = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    if os.getppid() == parent:
        select.select([end], [], [])


if __name__ == "__main__":
    main(sys.argv[1:])

"""A `holdfast serve` at free ports of loopback, as a context, for scripts that ask it over HTTP."""

import json
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO

from holdfast.worker.errors import ReplicaError

START_S: Final = 600.0
STOP_S: Final = 90.0
_URL: Final = re.compile(r"^HTTP, for OpenAI's clients: (http://\S+)/v1")


def end_on_sigterm() -> None:
    """Has SIGTERM unwind this process as Ctrl-C does, so that what it started ends with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextmanager
def served(settings: Mapping[str, Any], start_s: float = START_S) -> Iterator[str]:
    """Serves by `settings`, a mapping as in serve.yaml, whose `cluster` gets free ports. Gives the base URL.

    Its progress goes to stderr. Raises `ReplicaError` where it is not ready after `start_s` seconds.
    """
    port, http_port = free_ports(2)  # chosen here, so that a router which is started again comes back at them
    ports = {"routers": 1, "port": port, "http_port": http_port}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve.yaml"
        config.write_text(json.dumps({**settings, "cluster": {**settings.get("cluster", {}), **ports}}))
        command = [sys.executable, "-m", "holdfast.cluster.commands.cli", "serve", "--config", str(config)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            yield _url(process, start_s)
        finally:
            stop(process)


def free_ports(number: int) -> list[int]:
    """Ports of loopback that are free now, below those that systems give to connections."""
    found: list[int] = []
    while len(found) < number:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found


def stop(process: "subprocess.Popen[str]", wait_s: float = STOP_S) -> None:
    """Ends a process that leads its session, and its children: Ctrl-C, and SIGKILL after `wait_s` seconds."""
    for number, limit_s in ((signal.SIGINT, wait_s), (signal.SIGKILL, 10.0)):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)


def _url(process: "subprocess.Popen[str]", start_s: float) -> str:
    assert process.stdout is not None
    found = queue.Queue[str]()
    threading.Thread(target=_read, args=(process.stdout, found), daemon=True).start()
    try:
        url = found.get(timeout=start_s)
    except queue.Empty:
        raise ReplicaError(f"holdfast serve is not ready after {start_s:g} s") from None
    if not url:
        raise ReplicaError(f"holdfast serve has ended with exit code {process.wait(STOP_S)}")
    return url


def _read(stream: TextIO, found: "queue.Queue[str]") -> None:
    """Reads to the end, so that the writer never waits; the end itself is an empty URL."""
    for line in stream:
        if match := _URL.match(line):
            found.put(match[1])
    found.put("")

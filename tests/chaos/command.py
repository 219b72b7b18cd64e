"""`holdfast serve` as a command, with what only a process from outside can give it: limits, libraries, files."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

STOP_LIMIT_S = 90


@dataclass(frozen=True)
class Served:
    """A cluster that is up."""

    process: psutil.Process
    routers: tuple[str, ...]
    http: tuple[str, ...]

    def named(self, part: str) -> list[psutil.Process]:
        """Its processes of Ray whose title has `part` in it."""
        found = []
        for one in self.process.children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                if part in " ".join(one.cmdline()):
                    found.append(one)
        return found


@contextmanager
def served(
    *flags: str,
    environ: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    ports: tuple[int, int] = (0, 0),
) -> Iterator[Served]:
    """The bundled model, until the block ends. `before`: a command that becomes the one behind it. `ports` are the
    first for gRPC and HTTP; 0: any that are free, and others for a router that takes the place of one.
    """
    port, http_port = map(str, ports)
    command = [*before, sys.executable, "-m", "holdfast", "serve", "--port", port, "--http-port", http_port, *flags]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environ or {})}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        assert process.stdout is not None
        ready, http = (
            next((line for line in process.stdout if start in line), "") for start in ("ready after", "HTTP, for")
        )
        assert ready, "the cluster did not start; standard error says why"
        addresses = [tuple(re.findall(r"127\.0\.0\.1:\d+", line)) for line in (ready, http)]
        yield Served(psutil.Process(process.pid), *addresses)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_LIMIT_S)

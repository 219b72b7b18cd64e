"""Process of the front beside a cluster of this machine: started with it, started again if it ends, ended with it."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve.local import LOOPBACK
from holdfast.worker.errors import ConfigurationError

AGAIN_AFTER_S: Final = 0.2
"""A front that has ended is started again so much later."""

STOP_S: Final = 5.0


@contextmanager
def front_process(config: HoldfastConfig, warn: Callable[[str], None]) -> Iterator[str]:
    """Yields `host:port` of a front that runs for as long as the block does; empty where none is wanted.

    Raises `ConfigurationError` for one that cannot be started.
    """
    if config.cluster.http_front_port is None:
        yield ""
        return
    front = FrontProcess(command_of(config), warn)
    try:
        yield front.address
    finally:
        front.end()


def command_of(config: HoldfastConfig) -> list[str]:
    """The front of a cluster, before every router that may run on this machine.

    Raises `ConfigurationError` where routers ask for certificates that the front does not have.
    """
    cluster, security = config.cluster, config.security
    host = cluster.host or LOOPBACK
    if security.tls_client_ca is not None:
        raise ConfigurationError(
            "cluster.http_front_port with security.tls_client_ca: routers ask for a certificate of a client, and the "
            "front has none; run `holdfast front` with --routers-cert and --routers-key, or do without one of the two"
        )
    scheme = "http" if security.tls_cert is None else "https"
    called = LOOPBACK if host in ("0.0.0.0", "::") else host  # what is listened on is the caller's choice
    routers = [f"{scheme}://{called}:{http_port}" for _, http_port, _ in cluster.router_ports]
    command = [sys.executable, "-m", "holdfast", "front", "--routers", ",".join(routers), "--host", host]
    command += ["--port", str(cluster.http_front_port)]
    if security.tls_cert is not None:
        cert, key = str(security.tls_cert), str(security.tls_key)
        command += ["--tls-cert", cert, "--tls-key", key, "--routers-ca", cert]
    return command


class FrontProcess:
    """A front that is watched by a thread."""

    def __init__(self, command: list[str], warn: Callable[[str], None]) -> None:
        """Returns once it listens. Raises `ConfigurationError` for one that does not."""
        self._command = command
        self._warn = warn
        self._is_ending = threading.Event()
        self.num_starts = 0
        self.process, self.address = self._start()
        port = self.address.rpartition(":")[2]
        self._command[command.index("--port") + 1] = port  # of a free one: the same when it is started again
        self._watching = threading.Thread(target=self._watch, name="front", daemon=True)
        self._watching.start()

    def end(self) -> None:
        """What it has open has a second."""
        self._is_ending.set()
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._watching.join()

    def _watch(self) -> None:
        while True:
            code = self.process.wait()
            if self._is_ending.wait(AGAIN_AFTER_S):
                return
            self._warn(f"the front has ended ({code}); it is started again")
            try:
                self.process, _ = self._start()
            except ConfigurationError as error:
                self._warn(str(error))
                time.sleep(AGAIN_AFTER_S)

    def _start(self) -> tuple["subprocess.Popen[str]", str]:
        """The process, and `host:port` of it."""
        self.num_starts += 1
        process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None, "it is a pipe"
        line = process.stderr.readline()
        _, is_up, address = line.partition("the front is at ")
        if not is_up:
            process.kill()
            raise ConfigurationError(f"the front cannot be started: {line or 'it has ended'}")
        threading.Thread(target=_hand_on, args=(process.stderr,), name="front stderr", daemon=True).start()
        return process, address.partition(",")[0].partition("://")[2]


def _hand_on(lines: Iterator[str]) -> None:
    for line in lines:
        sys.stderr.write(line)

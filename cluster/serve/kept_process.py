"""Kept processes of a cluster on this machine: Ray's GCS and the front, which start again when they have ended, and the
raylet, whose end is reported.

Streams do not need the GCS. What dies while it is away is replaced once it is back.
"""

import logging
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.serve.reaper import descendants
from holdfast.router.dispatch.circuit_breaker import Backoff
from holdfast.worker.errors import ConfigurationError
from holdfast.worker.replica.probe_loop import ProbeLoop, probed
from holdfast.worker.replica.processes import ProcessId
from holdfast.worker.wire.loopback import LOOPBACK

logger = logging.getLogger(__name__)

RAYLET: Final = "raylet"

MAX_PAUSE_S: Final = 5.0
"""Between two starts of a process that ends again and again."""


class Kept(Protocol):
    """A process that is kept running."""

    @property
    def name(self) -> str:
        """Name in messages."""
        ...

    @property
    def effect(self) -> str:
        """Effect of its absence, for messages."""
        ...

    @property
    def process(self) -> "subprocess.Popen[bytes] | subprocess.Popen[str]":
        """The current one."""
        ...

    def start_again(self) -> object:
        """Replaces a process that has ended. Raises where there is no room for another."""
        ...


@contextmanager
def kept(it: Kept, say: Callable[[str], None]) -> Iterator[None]:
    """Restarts a process whenever it ends in the block, from a separate thread. `say` hears of each loss."""
    with _thread(f"{it.name}-keeper", lambda is_over: _keep(it, say, is_over)):
        yield


@contextmanager
def watched_raylet(on_loss: Callable[[str], None]) -> Iterator[None]:
    """Calls back once, from a separate thread, with the name of the raylet if it ends in the block."""
    (raylet,) = [pid for pid in descendants(os.getpid()) if _name(pid) == RAYLET]

    def wait(is_over: int) -> None:
        if not _is_over_before_end_of(raylet, is_over):
            on_loss(RAYLET)

    with _thread("ray-watch", wait):
        yield


def _name(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/comm") as file:
        return file.read().strip()
    return ""


@contextmanager
def _thread(name: str, run: Callable[[int], None]) -> Iterator[None]:
    """Runs `run` on a thread, with a descriptor that can be read once the block is over."""
    is_over, over = os.pipe()
    thread = threading.Thread(target=run, args=(is_over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(over)
        thread.join()
        os.close(is_over)


def _keep(it: Kept, say: Callable[[str], None], is_over: int) -> None:
    """Starts it again each time that it ends, until `is_over` can be read.

    The kernel ends a GCS with the *thread* that has started it (PR_SET_PDEATHSIG), so this one lasts whatever fails.
    """
    backoff = Backoff(max_pause_s=MAX_PAUSE_S)
    while True:
        started_s = time.monotonic()
        pause_s = MAX_PAUSE_S
        try:
            if _is_over_before_end_of(it.process.pid, is_over):
                return
            lasted_s = time.monotonic() - started_s
            backoff.note_fault(lasted_s)
            pause_s = backoff.pause_s(random.random())
            reason = f"{_reason(it.process.wait())} after {lasted_s:.1f} s"
            say(f"{it.name} has ended ({reason}); it restarts in {pause_s:.1f} s; {it.effect}")
        except Exception:  # no descriptors, or no reader
            logger.exception("restarting %s failed: internal error", it.name)
        if select.select([is_over], [], [], pause_s)[0]:
            return
        if it.process.poll() is None:  # nothing is known of its end
            continue
        try:
            it.start_again()
        except Exception:  # no memory for a process, no descriptors: the next turn tries again
            logger.exception("%s does not start", it.name)


def _is_over_before_end_of(pid: int, is_over: int) -> bool:
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:  # someone has waited for it already
        return bool(select.select([is_over], [], [], 0.0)[0])
    try:
        ready, _, _ = select.select([is_over, end], [], [])
        return is_over in ready
    finally:
        os.close(end)


def _reason(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


LOOK_EVERY_S: Final = 5.0
SILENT_S: Final = 30.0
"""A GCS that answers nothing for so long hangs. On a busy machine it answers late; to end it costs no stream."""


@dataclass(slots=True)
class Silence:
    """Since when a GCS has not answered. Times are in seconds of any one clock."""

    answered_s: float
    limit_s: float = SILENT_S

    def note(self, has_answered: bool, now_s: float) -> bool:
        """Notes one look at it. True: it hangs, and is given as long again from now on."""
        if has_answered:
            self.answered_s = now_s
        hangs = now_s - self.answered_s >= self.limit_s
        if hangs:
            self.answered_s = now_s
        return hangs


@contextmanager
def kept_gcs(
    gcs: Kept,
    say: Callable[[str], None],
    answers: Callable[[], bool],
    *,
    look_every_s: float = LOOK_EVERY_S,
    silent_s: float = SILENT_S,
) -> Iterator[None]:
    """Keeps the GCS for as long as the block lasts, and ends a hanging one. `say` hears of each loss.

    `answers` asks the GCS something and says whether it has answered in a few seconds.
    """
    silence = Silence(time.monotonic(), silent_s)

    def look() -> None:
        asked = gcs.process  # by the time that it has not answered, the next one may have started
        if silence.note(answers(), time.monotonic()):
            say(f"Ray's GCS has not answered for {silent_s:g} s and is ended")
            asked.kill()

    with kept(gcs, say), probed(ProbeLoop("gcs-look", look_every_s, look)):
        yield


IN_MEMORY: Final = Path("/dev/shm")
ROOM_BYTES: Final = 256 * 2**20
"""Least available memory for tables in memory; below it they are on disk. They take 27 MB."""

_PREFIX: Final = "holdfast-gcs-"


@contextmanager
def tables_folder(in_memory: Path = IN_MEMORY, on_disk: Path | None = None) -> Iterator[Path]:
    """A new folder, which is removed after the block. Removes those of processes that have ended without doing so."""
    on_disk = Path(tempfile.gettempdir()) if on_disk is None else on_disk
    for base in (in_memory, on_disk):
        _clear(base)
    base = in_memory if _has_room(in_memory) else on_disk
    process = ProcessId.of(os.getpid())
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{process.pid}-{process.start_ticks}-", dir=base))  # mode 0700
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_room(base: Path) -> bool:
    try:
        return shutil.disk_usage(base).free >= ROOM_BYTES and os.access(base, os.W_OK)
    except OSError:
        return False


def _clear(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        pid, ticks, *_ = folder.name.removeprefix(_PREFIX).split("-")
        with suppress(OSError, ValueError):  # not of this user, or gone meanwhile
            if folder.stat().st_uid == os.getuid() and not ProcessId(int(pid), int(ticks)).is_alive:
                shutil.rmtree(folder, ignore_errors=True)


STOP_S: Final = 5.0


@contextmanager
def front_process(config: HoldfastConfig, warn: Callable[[str], None]) -> Iterator[str]:
    """Yields `host:port` of a front that runs for as long as the block does; empty if no front is configured.

    Raises `ConfigurationError` if it cannot be started.
    """
    if config.cluster.http_front_port is None:
        yield ""
        return
    front = FrontProcess(command_of(config))
    try:
        with kept(front, warn):
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
            "cluster.http_front_port with security.tls_client_ca: routers require a client certificate, which the "
            "front lacks; run `holdfast front` with --routers-cert and --routers-key, or unset one of the two"
        )
    scheme = "http" if security.tls_cert is None else "https"
    called = LOOPBACK if host in ("0.0.0.0", "::") else host  # the caller chooses the address to listen on
    routers = [f"{scheme}://{called}:{http_port}" for _, http_port, _ in cluster.router_ports]
    command = [sys.executable, "-m", "holdfast", "front", "--routers", ",".join(routers), "--host", host]
    command += ["--port", str(cluster.http_front_port)]
    if security.tls_cert is not None:
        cert, key = str(security.tls_cert), str(security.tls_key)
        command += ["--tls-cert", cert, "--tls-key", key, "--routers-ca", cert]
    return command


class FrontProcess:
    """A front that can be started again at the same address."""

    name: Final = "the front"
    effect: Final = "clients are answered again then"

    def __init__(self, command: list[str]) -> None:
        """Returns once it listens. Raises `ConfigurationError` if it does not."""
        self._command = command
        self.process, self.address = self._started()
        port = self.address.rpartition(":")[2]
        self._command[command.index("--port") + 1] = port  # of a free one: the same when it is started again

    def start_again(self) -> None:
        """Raises `ConfigurationError` where it does not listen."""
        self.process, _ = self._started()

    def end(self) -> None:
        """Ends the front; its open connections have a second."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _started(self) -> tuple["subprocess.Popen[str]", str]:
        """The process, and `host:port` of it."""
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

"""Heartbeat pipe from a leader, or a router, to its hang supervisor: starts the supervisor and sends it heartbeats."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.worker.replica.hang_verdict import BEAT, InputSigns, beat_every_s
from holdfast.worker.replica.processes import ProcessId

logger = logging.getLogger(__name__)

START_AGAIN_AFTER_S: Final = 1.0

_PROGRAM: Final = (
    "import sys; sys.path.append({root!r}); from holdfast.worker.replica.hang_supervisor import main; main()"
)


class HeartbeatPipe:
    """Between this process and its hang supervisor, which runs from here on until `cut`, or the end of this process."""

    def __init__(self, limit_s: float, ranks: Iterable[ProcessId]) -> None:
        """Ends this process and `ranks`, on this machine, without a beat for `limit_s` after the first."""
        program = _PROGRAM.format(root=str(Path(__file__).parents[3]))
        whole_group = map(str, [ProcessId.of(os.getpid()), *ranks])
        self._beat_every_s = beat_every_s(limit_s)
        self._command = [sys.executable, "-I", "-S", "-c", program, str(limit_s), *whole_group]
        self._lock = threading.Lock()
        self._is_cut = False
        self._input_signs = InputSigns(limit_s)
        self._hang_supervisor = self._start()

    @property
    def hang_supervisor(self) -> ProcessId:
        """The hang supervisor that runs now."""
        return ProcessId.of(self._hang_supervisor.pid)

    async def keep_beating(self) -> None:
        """Beats from the running event loop until `cut`. It must be the loop that serves links or calls, so that the
        hang supervisor sees a hang as peers do.
        """
        while not self._is_cut:
            try:
                self._write(BEAT)
                await asyncio.sleep(self._beat_every_s)
            except BrokenPipeError:
                logger.warning("the hang supervisor of this process has ended: another takes its place")
                await asyncio.sleep(START_AGAIN_AFTER_S)
                try:
                    self._start_again()
                except OSError as error:
                    logger.error("the hang supervisor could not be started; this process runs without one: %s", error)
                    return

    def note_input(self, num_bytes: int) -> None:
        """Declares that work on input of this size begins: a loop that it keeps is busy, and does not hang.

        Cheap enough for every message. A broken pipe is repaired by the next heartbeat.
        """
        if sign := self._input_signs.of(num_bytes, time.monotonic()):
            with suppress(BrokenPipeError):
                self._write(sign)

    def cut(self) -> None:
        """Ends the hang supervisor: this process ends its ranks itself from now on. Safe
        to call twice.
        """
        with self._lock:
            self._is_cut = True
            self._dismiss()

    def _write(self, what: bytes) -> None:
        with self._lock:
            if not self._is_cut:
                with suppress(BlockingIOError):  # a hang supervisor that is stopped has more beats than it can read
                    os.write(self._pipe, what)

    def _start_again(self) -> None:
        with self._lock:
            if not self._is_cut:
                self._dismiss()
                self._hang_supervisor = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        """Starts the hang supervisor in this process's own group: a signal that stops them all, such as Ctrl-Z, stops
        it too.
        """
        hang_supervisor = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)
        assert hang_supervisor.stdin is not None, "it is a pipe"
        self._pipe = hang_supervisor.stdin.fileno()
        os.set_blocking(self._pipe, False)
        return hang_supervisor

    def _dismiss(self) -> None:
        self._hang_supervisor.kill()
        self._hang_supervisor.wait()
        assert self._hang_supervisor.stdin is not None, "it is a pipe"
        self._hang_supervisor.stdin.close()

"""Parent's end of one measured process: its start, its orders, its CPU time and its end.

A part is a module of this folder that runs as a program of its own. It says its address (or nothing) as its first line
of JSON, answers each line of JSON on its standard input with one on its standard output, and ends with the input.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection
from typing import Any, Final

from holdfast.cluster.serve.member_process import read_on_one_thread

_CPU_CLOCK = 2

OF_USERS: Final = ("arriving_clients", "clients", "http_clients")
"""Modules that stand for processes that are not started by `holdfast serve`."""


class Part:
    """One process. Use it as a context manager."""

    def __init__(self, module: str, *arguments: str, cores: Collection[int] = ()) -> None:
        """With `cores` it runs on these alone."""
        command = [sys.executable, "-m", f"benchmarks.router_parts.{module}", *arguments]
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores or own)
        try:  # a child has the cores of its parent's thread
            environ = dict(os.environ)
            if module not in OF_USERS:
                read_on_one_thread(environ)  # as `holdfast serve` does for its processes
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
            )
        finally:
            os.sched_setaffinity(0, own)
        self.address = str(self._answer().get("address", ""))

    def __enter__(self) -> "Part":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, what: str, **arguments: object) -> dict[str, Any]:
        """What the process answers to an order, when it has done it."""
        assert self._process.stdin is not None
        print(json.dumps({"what": what, **arguments}), file=self._process.stdin, flush=True)
        return self._answer()

    def cpu_s(self) -> float:
        """Seconds of CPU of all its threads so far, by the kernel's clock of that process, which has no ticks."""
        return time.clock_gettime((~self.pid << 3) | _CPU_CLOCK)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} has ended ({self._process.wait()})")
        answer: dict[str, Any] = json.loads(line)
        return answer

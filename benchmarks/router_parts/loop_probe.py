"""Loop probe: the longest time that a process's event loop did not turn, with and without what it waited for a core,
and its thread's CPU time meanwhile.

A timer of a millisecond fires once in each turn that is longer. The kernel counts how long a thread that could run had
no core (`schedstat`): that is the load of the machine, not what the process did.
"""

import asyncio
import os
import threading
import time
from typing import Any, Final

TICK_S: Final = 0.001
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class LoopProbe:
    """On the running event loop, from its first order on."""

    def __init__(self) -> None:
        self._stall_s = self._own_stall_s = self._turn_cpu_s = 0.0
        self._peak_bytes = 0
        self._schedule = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._probing: asyncio.Task[None] | None = None

    async def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        """`look`: what was the longest since the last look, in seconds, and the resident memory in bytes."""
        assert order["what"] == "look"
        if self._probing is None:
            self._probing = asyncio.create_task(self._probe(), name="loop probe")
        now = resident_bytes()
        seen = {
            "stall_s": self._stall_s,
            "own_stall_s": self._own_stall_s,
            "turn_cpu_s": self._turn_cpu_s,
            "peak_bytes": max(self._peak_bytes, now),
            "resident_bytes": now,
        }
        self._stall_s = self._own_stall_s = self._turn_cpu_s = 0.0
        self._peak_bytes = 0
        return seen

    async def _probe(self) -> None:
        count = 0
        while True:
            due_s, cpu_s, waited_s = time.perf_counter() + TICK_S, time.thread_time(), self._waited_s()
            await asyncio.sleep(TICK_S)
            stall_s = time.perf_counter() - due_s
            self._stall_s = max(self._stall_s, stall_s)
            self._own_stall_s = max(self._own_stall_s, stall_s - (self._waited_s() - waited_s))
            self._turn_cpu_s = max(self._turn_cpu_s, time.thread_time() - cpu_s)
            count += 1
            if count % 20 == 0:
                self._peak_bytes = max(self._peak_bytes, resident_bytes())

    def _waited_s(self) -> float:
        """For a core, since the thread began."""
        return int(os.pread(self._schedule, 64, 0).split()[1]) / 1e9


def resident_bytes() -> int:
    """Of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES

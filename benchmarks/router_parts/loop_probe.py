"""Loop probe: the longest time that a process's event loop did not turn, and its thread's CPU time meanwhile.

A timer of a millisecond fires once in each turn that is longer.
"""

import asyncio
import os
import time
from typing import Any, Final

TICK_S: Final = 0.001
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class LoopProbe:
    """On the running event loop, from its first order on."""

    def __init__(self) -> None:
        self._stall_s = self._turn_cpu_s = 0.0
        self._peak_bytes = 0
        self._probing: asyncio.Task[None] | None = None

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """`look`: what was the longest since the last look, in seconds, and the resident memory in bytes."""
        assert order["what"] == "look"
        if self._probing is None:
            self._probing = asyncio.create_task(self._probe(), name="loop probe")
        now = resident_bytes()
        seen = {
            "stall_s": self._stall_s,
            "turn_cpu_s": self._turn_cpu_s,
            "peak_bytes": max(self._peak_bytes, now),
            "resident_bytes": now,
        }
        self._stall_s = self._turn_cpu_s = 0.0
        self._peak_bytes = 0
        return seen

    async def _probe(self) -> None:
        count = 0
        while True:
            due_s, cpu_s = time.perf_counter() + TICK_S, time.thread_time()
            await asyncio.sleep(TICK_S)
            self._stall_s = max(self._stall_s, time.perf_counter() - due_s)
            self._turn_cpu_s = max(self._turn_cpu_s, time.thread_time() - cpu_s)
            count += 1
            if count % 20 == 0:
                self._peak_bytes = max(self._peak_bytes, resident_bytes())


def resident_bytes() -> int:
    """Of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES

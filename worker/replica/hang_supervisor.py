"""Hang supervisor: a small process that kills a leader and its ranks, or a router, when the whole process hangs.

    main()      # with arguments: limit_s leader rank ...; heartbeats come in on descriptor 0

A process that is stopped, or whose interpreter is stuck in a call, can neither notice nor end itself. A leader's ranks
are killed with it, because an incomplete group computes nothing. A process that has said that it works on large input,
and is seen to compute, is busy, and gets more time; and so does one that finds no core.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from holdfast.worker.replica.hang_verdict import HangVerdict, look_every_s
from holdfast.worker.replica.processes import CoreWait, ProcessId

_MANY: Final = 4096  # bytes
_LATE: Final = 0.25
"""Share of the limit without a sign of life from which on it is asked whether the process waits for a core."""


def main() -> None:
    """The supervisor's program. It ends with its leader at the latest."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the leader handles it
    limit_s = float(sys.argv[1])
    leader, *ranks = map(ProcessId.parse, sys.argv[2:])
    if hangs(leader, sys.stdin.fileno(), limit_s):
        whom = "it and its ranks" if ranks else "it"
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        print(
            f"{now} no heartbeat of process {leader.pid} for {limit_s:g} s: ending {whom}", file=sys.stderr, flush=True
        )
    end([leader, *ranks])


def cpu_time_s(pid: int) -> float:
    """Seconds that all threads of a process ran, or waited for a core to run, so far; 0 if the kernel does not tell."""
    total_ns = 0
    with suppress(OSError):  # it has just ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
                ran_ns, waited_ns, _ = file.read().split()
                total_ns += int(ran_ns) + int(waited_ns)
    return total_ns / 1e9


def hangs(leader: ProcessId, beats: int, limit_s: float) -> bool:
    """Watches until there is a verdict: True for a leader that hangs, False for one that has ended.

    `HangVerdict` decides, by the bytes that the leader writes to `beats`. It need not write before its first byte, nor
    while a debugger traces it. If `beats` is closed, it has ended; it may also end while a child holds `beats` open.
    """
    try:
        ending = leader.open()
    except ProcessLookupError:
        return False
    poll = select.poll()
    for descriptor in (beats, ending):
        poll.register(descriptor, select.POLLIN)
    verdict, core_wait = HangVerdict(limit_s), CoreWait(lambda: [leader])
    every_s, looked_s = look_every_s(limit_s), time.monotonic()
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(1000 * every_s)}
        news = os.read(beats, _MANY) if beats in ready else None
        if ending in ready or news == b"":
            return False
        cpu_s, now = cpu_time_s(leader.pid) if verdict.still_s > 0 else 0.0, time.monotonic()
        starved_s = 0.0
        if news or verdict.still_s < _LATE * limit_s:
            core_wait.forget()
        else:
            starved_s = core_wait.since_last(now - looked_s)
        looked_s, is_held = now, not news and is_traced(leader.pid)
        if verdict.look(news or b"", cpu_s, is_traced=is_held, now=now, starved_s=starved_s):
            return True


def is_traced(pid: int) -> bool:
    """Whether a debugger holds a process, and may have stopped it."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in file)
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has just ended, as its descriptor will tell


def end(processes: Iterable[ProcessId]) -> None:
    """SIGKILL to the remaining processes."""
    for process in processes:
        with suppress(ProcessLookupError):
            process.kill()

"""Hang supervisor: a small process that kills a leader and its ranks, or a router, when the whole process hangs.

    main()      # with arguments: limit_s leader rank ...; heartbeats come in on descriptor 0

A process that is stopped, or whose interpreter is stuck in a call, can neither notice nor end itself. A leader's ranks
are killed with it, because an incomplete group computes nothing. What may not live here: imports beyond the standard
library and the rule of `worker/progress.py`, which would take long to load; starting the supervisor
(`heartbeat_pipe.py`).
"""

import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from holdfast.worker.progress import LONGEST_LOOK_S, FrozenVerdict
from holdfast.worker.supervision.process_id import ProcessId

_MANY: Final = 4096


def main() -> None:
    """The supervisor's program. It ends with its leader at the latest."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the leader decides what it means
    limit_s = float(sys.argv[1])
    leader, *ranks = map(ProcessId.parse, sys.argv[2:])
    if hangs(leader, sys.stdin.fileno(), limit_s):
        whom = "it and its ranks" if ranks else "it"
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        print(f"{now} no beat of process {leader.pid} for {limit_s:g} s: ending {whom}", file=sys.stderr, flush=True)
    end([leader, *ranks])


def hangs(leader: ProcessId, beats: int, limit_s: float) -> bool:
    """Watches until there is a verdict: True for a leader that hangs, False for one that has ended.

    It hangs if none of the bytes it writes to `beats` comes for `limit_s`. Before the first, and while it is traced by
    a debugger, it need not write any. The end of `beats` is its end, which may come without: a child may hold it open.
    """
    try:
        ending = leader.open()
    except ProcessLookupError:
        return False
    poll = select.poll()
    for descriptor in (beats, ending):
        poll.register(descriptor, select.POLLIN)
    verdict, num_beats = FrozenVerdict(limit_s), 0
    look_every_s = min(LONGEST_LOOK_S, limit_s / 8)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(1000 * look_every_s)}
        news = os.read(beats, _MANY) if beats in ready else None
        if ending in ready or news == b"":
            return False
        num_beats += len(news or b"")
        is_watched = num_beats > 0 and (news is not None or not is_traced(leader.pid))
        if verdict.look(num_beats, has_work=is_watched, expected_gap_s=0.0, now=time.monotonic()):
            return True


def is_traced(pid: int) -> bool:
    """Whether a debugger holds a process, and may have stopped it."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in file)
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has just ended, as its descriptor will tell


def end(processes: Iterable[ProcessId]) -> None:
    """SIGKILL to those that are left."""
    for process in processes:
        with suppress(ProcessLookupError):
            process.kill()

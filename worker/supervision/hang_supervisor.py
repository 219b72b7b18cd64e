"""Hang supervisor: a small process that kills a leader and its ranks, or a router, when the whole process hangs.

    main()      # with arguments: limit_s leader rank ...; heartbeats come in on descriptor 0

A process that is stopped, or whose interpreter is stuck in a call, can neither notice nor end itself. A leader's ranks
are killed with it, because an incomplete group computes nothing. A process that has said that it works on large input,
and is seen to compute, is busy, and gets more time. What may not live here: imports beyond the standard library and the
rule of `worker/progress.py`, which would take long to load; starting the supervisor (`heartbeat_pipe.py`).
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

BEAT: Final = b"."
"""What a process says over the pipe. From its event loop: it turns."""

INPUT: Final = b"i"
"""Work on input begins on it."""

LARGE_INPUT: Final = b"I"
"""Work on input begins that may keep the loop, or Python's lock, for long."""

BUSY_TIMES: Final = 6.0
"""A process that computes on input is ended after so many times the limit without a beat."""

BUSY_SHARE: Final = 0.5
"""Of the time of a look, what all threads together ran, or waited for a core, in a process that computes."""


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


class HangVerdict:
    """The rule: no sign of life for `limit_s`, where a beat is one, and so is input whose work begins. A process that
    computes on large input is busy, and needs none. Without a beat for `BUSY_TIMES` the limit it hangs all the same.

    No clock: the time is passed in. Only watched time counts (`FrozenVerdict`).
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._stillness = FrozenVerdict(limit_s)
        self._silence = FrozenVerdict(BUSY_TIMES * limit_s)
        self._num_signs = self._num_beats = 0
        self._has_large_input = False
        """Some was declared since the last beat."""
        self._looked: tuple[float, float] | None = None
        """When, and the CPU time then."""
        self._idle_s = 0.0
        """How long it has not computed, at a stretch."""

    @property
    def still_s(self) -> float:
        """Seconds, as far as they were watched, without a sign of life."""
        return self._stillness.still_s

    def look(self, news: bytes, cpu_s: float, *, is_traced: bool, now: float) -> bool:
        """Whether it hangs. `news` has come over the pipe since the last look; `cpu_s` is its CPU time so far."""
        self._num_signs += len(news)
        self._num_beats += news.count(BEAT)
        *_, since_beat = news.rpartition(BEAT)
        self._has_large_input = LARGE_INPUT in since_beat or (self._has_large_input and BEAT not in news)
        self._note_cpu(cpu_s, now)
        is_watched = self._num_beats > 0 and not is_traced
        is_still = self._stillness.look(self._num_signs, has_work=is_watched, expected_gap_s=0.0, now=now)
        is_silent = self._silence.look(self._num_beats, has_work=is_watched, expected_gap_s=0.0, now=now)
        return is_silent or (is_still and not self._is_busy)

    @property
    def _is_busy(self) -> bool:
        return self._has_large_input and self._idle_s < self._limit_s / 2

    def _note_cpu(self, cpu_s: float, now: float) -> None:
        if self._looked is not None:
            looked_at, cpu_then_s = self._looked
            elapsed_s = now - looked_at
            is_idle = cpu_s - cpu_then_s < BUSY_SHARE * elapsed_s
            self._idle_s = self._idle_s + min(elapsed_s, LONGEST_LOOK_S) if is_idle else 0.0
        self._looked = now, cpu_s


def cpu_time_s(pid: int) -> float:
    """What all threads of a process ran, or waited for a core to run, so far; 0 where the kernel does not tell."""
    total_ns = 0
    with suppress(OSError):  # it has just ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
                ran_ns, waited_ns, _ = file.read().split()
                total_ns += int(ran_ns) + int(waited_ns)
    return total_ns / 1e9


def hangs(leader: ProcessId, beats: int, limit_s: float) -> bool:
    """Watches until there is a verdict: True for a leader that hangs, False for one that has ended.

    It hangs by the rule of `HangVerdict`, of the bytes it writes to `beats`. Before the first, and while it is traced
    by a debugger, it need not write any. The end of `beats` is its end, which may come without: a child may hold it
    open.
    """
    try:
        ending = leader.open()
    except ProcessLookupError:
        return False
    poll = select.poll()
    for descriptor in (beats, ending):
        poll.register(descriptor, select.POLLIN)
    verdict = HangVerdict(limit_s)
    look_every_s = min(LONGEST_LOOK_S, limit_s / 8)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(1000 * look_every_s)}
        news = os.read(beats, _MANY) if beats in ready else None
        if ending in ready or news == b"":
            return False
        cpu_s = cpu_time_s(leader.pid) if verdict.still_s > 0 else 0.0
        if verdict.look(news or b"", cpu_s, is_traced=not news and is_traced(leader.pid), now=time.monotonic()):
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

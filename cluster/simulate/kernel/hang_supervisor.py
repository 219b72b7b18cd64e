"""Hang supervisor of a simulated process: the real rule, by heartbeats from its event loop and by what it computes.

What may live here: when it looks, and when the process beats. What may not: the rule
(`worker/supervision/hang_verdict.py`), and what is done to a process that hangs.
"""

from collections.abc import Callable
from typing import Protocol

from holdfast.cluster.simulate.kernel.timeline import Timeline
from holdfast.worker.supervision.hang_verdict import BEAT, HangVerdict, InputSigns, beat_every_s, look_every_s


class Watched(Protocol):
    """What it sees of a process, and the process's own timer."""

    num_lives: int
    is_up: bool

    @property
    def computed_s(self) -> float:
        """CPU time of all of its threads so far."""

    def after(self, delay_s: float, action: Callable[..., None]) -> None: ...


class SimulatedHangSupervisor:
    """Of one life of a process."""

    def __init__(self, process: Watched, timeline: Timeline, limit_s: float, on_hang: Callable[[], None]) -> None:
        self._process = process
        self._timeline = timeline
        self._limit_s = limit_s
        self._on_hang = on_hang
        self._life = process.num_lives
        self._verdict = HangVerdict(limit_s)
        self._input_signs = InputSigns(limit_s)
        self._news = b""
        self._beat()
        self._timeline.after(look_every_s(limit_s), self._look)

    def note_input(self, num_bytes: int) -> None:
        """The process says that work on input of this size begins."""
        self._news += self._input_signs.of(num_bytes, self._timeline.now)

    def __str__(self) -> str:
        return f"{self._process}, hang supervisor:"

    def _beat(self) -> None:
        self._news += BEAT
        self._process.after(beat_every_s(self._limit_s), self._beat)

    def _look(self) -> None:
        process = self._process
        if not process.is_up or process.num_lives != self._life:
            return
        news, self._news = self._news, b""
        if self._verdict.look(news, process.computed_s, is_traced=False, now=self._timeline.now):
            self._on_hang()
        else:
            self._timeline.after(look_every_s(self._limit_s), self._look)

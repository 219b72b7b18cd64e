"""Clock of a simulated process, with the timers of an asyncio event loop. It can be set, and its alarms follow it."""

from collections.abc import Callable
from typing import Final

from holdfast.cluster.simulate.kernel.process import Process

EARLY_S: Final = 1e-6
"""Resolution of the clock: alarms may ring this much early, as asyncio's may. Sums of floats are not exact either."""


class Alarm:
    """A scheduled call, unless it is cancelled. Its user must not read `due`: not every event loop's handle has it."""

    def __init__(self, due: float, callback: Callable[[], object]) -> None:
        self.is_set = True
        self.callback = callback
        self.due = due

    def cancel(self) -> None:
        self.is_set = False


class SettableClock:
    """The clock of one life of a process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._alarms: list[Alarm] = []

    def time(self) -> float:
        return self._process.clock

    def call_at(self, when: float, callback: Callable[[], object], /) -> Alarm:
        alarm = Alarm(when, callback)
        self._alarms = [*(alarm for alarm in self._alarms if alarm.is_set), alarm]
        self._wait_for(alarm)
        return alarm

    def rings_by(self, when: float) -> bool:
        """Whether an alarm is set for then, or for earlier."""
        return any(alarm.is_set and alarm.due <= when for alarm in self._alarms)

    def note_set(self) -> None:
        """The process's clock was set: schedules every alarm anew."""
        for alarm in self._alarms:
            self._wait_for(alarm)

    def _wait_for(self, alarm: Alarm) -> None:
        left_s = alarm.due - self.time()
        self._process.after(max(EARLY_S, left_s - EARLY_S), self._ring, alarm)

    def _ring(self, alarm: Alarm) -> None:
        is_due = self.time() >= alarm.due - 2 * EARLY_S  # it is not if the clock was set back
        if alarm.is_set and is_due:
            alarm.cancel()
            alarm.callback()

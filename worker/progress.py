"""When a replica that says nothing has hung: the verdict, as arithmetic on a counter and the time.

What may not live here: clocks, threads, and what follows from the verdict. Any unit of work that is done raises the
counter, also one inside a step, so that a long prefill that is getting on is not taken for a hung one.
"""

from typing import Final

MIN_FROZEN_S: Final = 1.0
PAUSES_PER_VERDICT: Final = 20.0
SMOOTHING: Final = 0.1
"""Weight of the newest pause between two signs of progress in the usual one."""


class FrozenVerdict:
    """Frozen is who has work and no progress for `max(1 s, 20 x the usual pause between two signs of progress)`.

    Times are seconds of any one clock; should it go backwards, the wait begins anew. The wait for a first sign begins
    with the first question after the work came.
    """

    def __init__(self) -> None:
        self._counter = 0
        self._has_work = False
        self._since: float | None = None
        self._usual_s = 0.0

    @property
    def limit_s(self) -> float:
        """Seconds without progress after which the verdict is given."""
        return max(MIN_FROZEN_S, PAUSES_PER_VERDICT * self._usual_s)

    def note_progress(self, counter: int, now: float) -> None:
        """What the counter says now. Only a change counts, and only a pause with work to do says what is usual."""
        if counter == self._counter:
            return
        if self._has_work and self._since is not None:
            pause_s = min(max(0.0, now - self._since), self.limit_s)
            weight = SMOOTHING if self._usual_s else 1.0
            self._usual_s += weight * (pause_s - self._usual_s)
        self._counter = counter
        self._since = now if self._has_work else None

    def has_work(self, has_work: bool) -> None:
        """Whether there is anything to do."""
        if has_work != self._has_work:
            self._has_work = has_work
            self._since = None

    def is_frozen(self, now: float) -> bool:
        """Whether there was work and no progress for too long."""
        if not self._has_work:
            return False
        if self._since is None or now < self._since:
            self._since = now
        return now - self._since > self.limit_s

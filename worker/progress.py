"""Progress: reports of long operations, a counter that moves within a step, and the rule by which an engine counts as
frozen.
"""

from collections.abc import Callable
from typing import Final

Report = Callable[[str, int, int], None]
"""`report(phase, done, total)`: reports the progress of long operations. A phase ends when `done` reaches `total`; a
total of 1 is a phase without steps.
"""

AT_LEAST_S: Final = 1.0
NUM_EXPECTED_GAPS: Final = 20.0
LONGEST_LOOK_S: Final = 0.25
"""Most seconds counted between two looks: the observer may have been held up itself, on a busy machine or by a
debugger, and must not blame another for that."""

_WEIGHT: Final = 0.1  # of the newest gap in the moving average


class ProgressCounter:
    """Moves whenever some work was done: with every layer of a model and with every step. It is written by one thread,
    or by two where steps have a separate thread, which may lose a count; any thread may read it.

    It also learns how far apart in time two counts are: the longest such gap of a step, by the size of the step. On a
    CPU that is about the time of a layer; on a GPU, whose layers count when they are launched, the time of a step.
    """

    __slots__ = (
        "_further",
        "_longest_gap_s",
        "_ticked_at",
        "_ticks",
        "_usual_gap_s",
        "clock",
        "expected_gap_s",
        "starved_s",
    )

    def __init__(self) -> None:
        self.clock: Callable[[], float] = _stopped_clock
        """Clock in seconds; set by the engine. Ranks other than the leader have none."""
        self._ticks = 0
        self._further: Callable[[], int] | None = None
        self.expected_gap_s = 0.0
        """The longest time between two counts that the step now running, or the last one, should have."""
        self.starved_s = 0.0
        """Seconds that work stood still, all together, because other programs had the cores; the watchdog adds to it.
        """
        self._ticked_at = 0.0
        self._longest_gap_s = 0.0
        # of steps with this many bits in their number of tokens: sizes between two powers of two
        self._usual_gap_s: dict[int, float] = {}

    @property
    def count(self) -> int:
        """Changes whenever some work was done."""
        return self._ticks + (self._further() if self._further is not None else 0)

    def follow(self, further: Callable[[], int]) -> None:
        """Counts what `further` counts as well: work inside a call that Python does not see. Any thread may call it."""
        self._further = further

    def tick(self) -> None:
        """Moves the counter. For the thread that computes."""
        now = self.clock()
        gap_s = now - self._ticked_at
        if gap_s > self._longest_gap_s:
            self._longest_gap_s = gap_s
        self._ticked_at = now
        self._ticks += 1

    def begin_step(self, num_tokens: int) -> None:
        """Steps that are larger than all before are expected to have gaps as much longer as they are larger."""
        size, usual_gap_s = num_tokens.bit_length(), self._usual_gap_s
        nearest = size
        if size not in usual_gap_s:
            nearest = max((seen for seen in usual_gap_s if seen <= size), default=min(usual_gap_s, default=0))
        self.expected_gap_s = usual_gap_s.get(nearest, 0.0) * 2 ** max(0, size - nearest)
        self.tick()
        self._longest_gap_s = 0.0  # the time between two steps is not the step's

    def end_step(self, num_tokens: int) -> None:
        """Takes the step's longest gap into the usual gap for its size: a moving average."""
        self.tick()
        size = num_tokens.bit_length()
        usual_gap_s = self._usual_gap_s.get(size, self._longest_gap_s)
        self._usual_gap_s[size] = usual_gap_s + _WEIGHT * (self._longest_gap_s - usual_gap_s)


def _stopped_clock() -> float:
    return 0.0


class FrozenVerdict:
    """The rule: frozen means work, and no count for `max(at_least_s, 20 times the longest gap that is expected)`.

    `look` is called at regular times with the counter as it is then. No clock: the time is passed in.
    """

    def __init__(self, at_least_s: float = AT_LEAST_S) -> None:
        self._at_least_s = at_least_s
        self._count: int | None = None
        self._looked_at: float | None = None
        self._starved_s = 0.0
        self.still_s = 0.0
        """Seconds, as far as they were watched, without progress while there was work."""

    def look(self, count: int, *, has_work: bool, expected_gap_s: float, now: float, starved_s: float = 0.0) -> bool:
        """Whether it is frozen. `count` is the counter as last known: a heartbeat that does not come is no progress.

        `starved_s` is `ProgressCounter.starved_s` as last known. Time without a core does not count.
        """
        since = 0.0 if self._looked_at is None else min(max(0.0, now - self._looked_at), LONGEST_LOOK_S)
        since, self._starved_s = max(0.0, since - (starved_s - self._starved_s)), starved_s
        self._looked_at = now if has_work else None  # when work comes, the time before it does not count
        if count != self._count or not has_work:
            self._count = count
            self.still_s = 0.0
            return False
        self.still_s += since
        return self.still_s >= max(self._at_least_s, NUM_EXPECTED_GAPS * expected_gap_s)

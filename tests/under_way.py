"""The assertion of each test that strikes a cluster under streams: these were under way when the fault came.

A stream that had ended before proves nothing, and passes.
"""

from collections.abc import Iterable, Sequence


def were_under_way(arrivals_s: Iterable[Sequence[float]], struck_s: float, at_least: int = 1) -> None:
    """Asserts that so many streams had come to a chunk when the fault came, and came to another one afterwards.

    `arrivals_s` has for each stream when its chunks came, in order, by the clock of `struck_s`.
    """
    streams = [list(times_s) for times_s in arrivals_s]
    num_struck = sum(bool(times_s) and times_s[0] <= struck_s < times_s[-1] for times_s in streams)
    if num_struck < at_least:
        message = ", ".join(_told(times_s, struck_s) for times_s in streams) or "there was none"
        raise AssertionError(f"{num_struck} streams, not {at_least}, were under way when the fault came: {message}")


def _told(times_s: Sequence[float], struck_s: float) -> str:
    if not times_s:
        return "one without a chunk"
    return f"one from {times_s[0] - struck_s:+.2f} to {times_s[-1] - struck_s:+.2f} s"

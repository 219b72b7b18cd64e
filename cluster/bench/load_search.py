"""Search for the highest load within a service level objective: doubling, then bisection, in a bounded number of runs.

Pure: it says which load to try and is told what came of it. What may not live here: trying (`runs.py`).
"""

from typing import Final

_WIDEST: Final = 64
"""The search ends where a load so many times below the first is still too much."""


class LoadSearch:
    """Between the highest load that was fine and the lowest that was not.

    It holds for a server that gets no better under more load; where figures scatter, its answer is as good as a single
    try near it.
    """

    def __init__(self, start: float, *, tolerance: float = 0.05, max_tries: int = 12, is_whole: bool = False) -> None:
        """Ends when the two are within `tolerance` of each other, as a share, or after `max_tries`.

        `is_whole`: loads are whole numbers, such as users of a closed loop.
        """
        self._start = start
        self._tolerance = tolerance
        self._left = max_tries
        self._is_whole = is_whole
        self.best: float | None = None
        """The highest load that was fine so far; None: none was."""
        self.lowest_bad: float | None = None

    def next(self) -> float | None:
        """The load to try; None: the search is over."""
        if self._left == 0:
            return None
        if self.best is None and self.lowest_bad is None:
            return self._rounded(self._start)
        if self.lowest_bad is None:
            assert self.best is not None
            return self._rounded(self.best * 2)
        if self.best is None:
            below = self._rounded(self.lowest_bad / 2)
            return below if below < self.lowest_bad and below * _WIDEST >= self._start else None
        if self.lowest_bad <= self.best * (1 + self._tolerance):
            return None
        middle = self._rounded((self.best + self.lowest_bad) / 2)
        return middle if self.best < middle < self.lowest_bad else None

    def note(self, load: float, *, is_fine: bool) -> None:
        """What came of a try. A load above one that was too much is taken to be too much as well."""
        self._left -= 1
        if is_fine and (self.lowest_bad is None or load < self.lowest_bad):
            self.best = load if self.best is None else max(self.best, load)
        elif not is_fine:
            self.lowest_bad = load if self.lowest_bad is None else min(self.lowest_bad, load)

    def _rounded(self, load: float) -> float:
        return max(1.0, float(round(load))) if self._is_whole else load

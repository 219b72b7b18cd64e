"""Draft length of one request: it follows the acceptance rate, and is shorter the more sequences decode.

A state machine without clock or randomness. What may not live here: proposing drafts, and how much room a step has.
"""

from typing import Final

_START: Final = 0.5
_WEIGHT: Final = 0.3
"""Of the newest verification in the moving average."""

_PROBE_TOKENS: Final = 2
_FIRST_SLEEP: Final = 16
_LONGEST_SLEEP: Final = 256
"""In steps of the sequence."""

_BY_BATCH_SIZE: Final = ((2, 64), (4, 4), (8, 2), (16, 1))
"""Up to so many sequences that decode together: at most so many drafts for each. With more, drafts cost other requests
more time than they save."""


def longest_for(num_decoding: int) -> int:
    """The most tokens worth guessing for each of so many sequences that decode in one step."""
    return next((length for size, length in _BY_BATCH_SIZE if num_decoding <= size), 0)


class DraftLength:
    """Draft length of one sequence. While hardly any draft is accepted it drafts nothing, and probes with a short draft
    now and then, more and more rarely as long as that fails."""

    __slots__ = ("_acceptance", "_least_acceptance", "_num_steps_asleep", "_sleep")

    def __init__(self, least_acceptance: float = 0.15) -> None:
        """Below this acceptance rate drafting costs more than it saves. Less than 0.5."""
        self._least_acceptance = least_acceptance
        self._acceptance = _START
        self._sleep = _FIRST_SLEEP
        self._num_steps_asleep = 0

    def next(self, longest: int) -> int:
        """How many tokens to guess in this step, at most `longest`. Called once for every step that decodes."""
        if self._acceptance >= self._least_acceptance:
            return min(longest, max(1, round(longest * self._acceptance * 1.25)))
        self._num_steps_asleep += 1
        return min(longest, _PROBE_TOKENS) if self._num_steps_asleep > self._sleep else 0

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """So many drafts were verified, at least one, and so many of them accepted."""
        was_probe = self._acceptance < self._least_acceptance
        self._acceptance += _WEIGHT * (num_accepted / num_drafts - self._acceptance)
        self._num_steps_asleep = 0
        if self._acceptance >= self._least_acceptance:
            self._sleep = _FIRST_SLEEP
        elif was_probe:
            self._sleep = min(2 * self._sleep, _LONGEST_SLEEP)

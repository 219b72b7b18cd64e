"""How much the run of every day tries, which leaves out `slow`.

A quarter of the examples that Hypothesis tries in a long run, the same ones each day; of tests that are marked
`in_turn` each value of each parameter once, not all combinations. A long run tries new examples each time.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Final

import hypothesis
import pytest

DEFAULT: Final = 100
"""Hypothesis' own number, for tests that name none."""
EVERY_DAY: Final = 4
"""One in so many."""


def load_profile(*, is_long: bool) -> None:
    """Before tests are imported. No deadline in either: how long an example takes is no property."""
    hypothesis.settings.register_profile(
        "every day", deadline=None, max_examples=DEFAULT // EVERY_DAY, derandomize=True
    )
    hypothesis.settings.register_profile("long", deadline=None, max_examples=DEFAULT)
    hypothesis.settings.load_profile("long" if is_long else "every day")


def examples(number: int) -> int:
    """`max_examples` of a test that tries so many in a long run."""
    return number * hypothesis.settings.default.max_examples // DEFAULT


def leave_to_long_runs(items: Iterable[pytest.Item]) -> None:
    """Marks as `slow` what is beyond each value in its turn: of parameters with m and n values max(m, n) tests stay."""
    marked = (item for item in items if item.get_closest_marker("in_turn") and not item.get_closest_marker("slow"))
    for _, group in groupby(marked, key=lambda item: item.nodeid.partition("[")[0]):
        tests = [(item, item.callspec._idlist) for item in group]  # type: ignore[attr-defined]  # pytest 9.2: an id of each
        axes = [list(dict.fromkeys(ids)) for ids in zip(*(ids for _, ids in tests), strict=True)]
        turns = [[axis[turn % len(axis)] for axis in axes] for turn in range(max(map(len, axes)))]
        for item, ids in tests:
            if list(ids) not in turns:
                item.add_marker(pytest.mark.slow)

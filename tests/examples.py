"""How many examples Hypothesis tries: all in a long run, a quarter in the run of every day, which leaves out `slow`."""

from typing import Final

import hypothesis

DEFAULT: Final = 100
"""Hypothesis' own number, for tests that name none."""
EVERY_DAY: Final = 4
"""One in so many."""


def load_profile(*, is_long: bool) -> None:
    """Before tests are imported. No deadline in either: how long an example takes is no property."""
    hypothesis.settings.register_profile("every day", deadline=None, max_examples=DEFAULT // EVERY_DAY)
    hypothesis.settings.register_profile("long", deadline=None, max_examples=DEFAULT)
    hypothesis.settings.load_profile("long" if is_long else "every day")


def examples(number: int) -> int:
    """`max_examples` of a test that tries so many in a long run."""
    return number * hypothesis.settings.default.max_examples // DEFAULT

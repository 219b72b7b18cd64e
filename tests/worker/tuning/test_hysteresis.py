"""A dial goes where clear and lasting wishes point, and else nowhere."""

import random

from holdfast.worker.tuning.hysteresis import COOL_DOWN, NUM_IN_A_ROW, Dial


def wish(dial: Dial, *values: int) -> int:
    """How many of the wishes turned it."""
    return sum(dial.wish(value) for value in values)


def test_lasting_wishes_turn_it_once_and_to_the_most_modest_of_them():
    dial = Dial(64, low=1, high=64)
    assert wish(dial, 20, 30, 25) == 1
    assert dial.value == 30


def test_a_burst_turns_nothing():
    dial = Dial(64, low=1, high=64)
    assert wish(dial, *[20, 20, 64] * 10) == 0


def test_wishes_close_to_the_value_turn_nothing():
    dial, rng = Dial(40, low=1, high=1000), random.Random(0)
    assert wish(dial, *[rng.randint(33, 49) for _ in range(1000)]) == 0


def test_it_hears_nothing_for_a_while_after_a_turn():
    dial = Dial(64, low=1, high=1000)
    wish(dial, *[20] * NUM_IN_A_ROW)
    assert wish(dial, *[200] * (COOL_DOWN + NUM_IN_A_ROW - 1)) == 0
    assert wish(dial, 200) == 1


def test_going_back_takes_more_than_going_on():
    for back, forth in ((27, 15), (27, 13)):
        dial = Dial(64, low=1, high=64)
        wish(dial, *[20] * NUM_IN_A_ROW)
        assert wish(dial, *[back] * (COOL_DOWN + NUM_IN_A_ROW)) == 0, "within the square of the band"
        assert wish(dial, *[forth] * NUM_IN_A_ROW) == 1


def test_it_stays_within_its_bounds():
    dial = Dial(64, low=8, high=100)
    wish(dial, *[1] * 20)
    assert dial.value == 8
    wish(dial, *[10**6] * 20)
    assert dial.value == 100


def test_wishes_to_both_sides_cancel_out():
    dial = Dial(64, low=1, high=1000)
    assert wish(dial, *[20, 200] * 20) == 0

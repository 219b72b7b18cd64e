"""A setting with hysteresis goes where clear and lasting wishes point, and else nowhere."""

import random

from holdfast.worker.scheduler.batching_optimizer import COOL_DOWN, NUM_IN_A_ROW, Hysteresis


def propose(setting: Hysteresis, *values: int) -> int:
    """How many of the wishes turned it."""
    return sum(setting.propose(value) for value in values)


def test_lasting_proposals_turn_it_once_and_to_the_most_modest_of_them():
    setting = Hysteresis(64, low=1, high=64)
    assert propose(setting, 20, 30, 25) == 1
    assert setting.value == 30


def test_a_burst_turns_nothing():
    setting = Hysteresis(64, low=1, high=64)
    assert propose(setting, *[20, 20, 64] * 10) == 0


def test_proposals_close_to_the_value_turn_nothing():
    setting, rng = Hysteresis(40, low=1, high=1000), random.Random(0)
    assert propose(setting, *[rng.randint(33, 49) for _ in range(1000)]) == 0


def test_it_hears_nothing_for_a_while_after_a_turn():
    setting = Hysteresis(64, low=1, high=1000)
    propose(setting, *[20] * NUM_IN_A_ROW)
    assert propose(setting, *[200] * (COOL_DOWN + NUM_IN_A_ROW - 1)) == 0
    assert propose(setting, 200) == 1


def test_going_back_takes_more_than_going_on():
    for back, forth in ((27, 15), (27, 13)):
        setting = Hysteresis(64, low=1, high=64)
        propose(setting, *[20] * NUM_IN_A_ROW)
        assert propose(setting, *[back] * (COOL_DOWN + NUM_IN_A_ROW)) == 0, "within the square of the band"
        assert propose(setting, *[forth] * NUM_IN_A_ROW) == 1


def test_it_stays_within_its_bounds():
    setting = Hysteresis(64, low=8, high=100)
    propose(setting, *[1] * 20)
    assert setting.value == 8
    propose(setting, *[10**6] * 20)
    assert setting.value == 100


def test_proposals_to_both_sides_cancel_out():
    setting = Hysteresis(64, low=1, high=1000)
    assert propose(setting, *[20, 200] * 20) == 0

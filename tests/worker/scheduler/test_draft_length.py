"""Drafts grow with what comes true, shrink to nothing with what does not, and are tried again now and then."""

import random
from itertools import pairwise

from holdfast.worker.scheduler.drafters import DraftLength, longest_for


def play(length: DraftLength, num_steps: int, acceptance: float, longest: int = 8) -> list[int]:
    """The lengths of so many steps in which this share of each draft comes true."""
    lengths = []
    for _ in range(num_steps):
        lengths.append(length.next(longest))
        if lengths[-1]:
            length.observe(lengths[-1], int(acceptance * lengths[-1]))
    return lengths


def test_drafts_that_always_come_true_are_as_long_as_may_be():
    assert set(play(DraftLength(), 40, acceptance=1.0)[5:]) == {8}


def test_drafts_that_never_come_true_soon_end():
    lengths = play(DraftLength(), 1000, acceptance=0.0)
    assert lengths[6:16] == [0] * 10
    assert sum(lengths) < 60


def test_probes_are_short_and_come_ever_more_rarely():
    lengths = play(DraftLength(), 2000, acceptance=0.0)
    probes = [step for step, length in enumerate(lengths) if length and step > 10]
    gaps = [after - before for before, after in pairwise(probes)]
    assert {lengths[step] for step in probes} == {2}
    assert gaps == sorted(gaps)
    assert gaps[-1] == 257


def test_a_probe_that_comes_true_wakes_it():
    length = DraftLength()
    play(length, 300, acceptance=0.0)
    assert 8 in play(length, 400, acceptance=1.0)[-100:]


def test_half_right_drafts_are_shorter_than_right_ones_and_not_none():
    assert all(3 <= length <= 6 for length in play(DraftLength(), 50, acceptance=0.5)[10:])


def test_single_drafts_that_mostly_come_true_do_not_stop():
    """By chance several in a row are wrong, which says little."""
    coins = random.Random(0)
    length, num_asleep = DraftLength(0.3), 0
    for _ in range(2000):
        if length.next(1):
            length.observe(1, int(coins.random() < 0.6))
        else:
            num_asleep += 1
    assert num_asleep < 100


def test_the_step_has_the_last_word():
    length = DraftLength()
    play(length, 20, acceptance=1.0)
    assert [length.next(longest) for longest in (1, 3, 64)] == [1, 3, 64]


def test_the_more_sequences_the_shorter_down_to_none():
    longest = [longest_for(size) for size in range(1, 100)]
    assert longest == sorted(longest, reverse=True)
    assert longest[0] >= 8
    assert longest[-1] == 0

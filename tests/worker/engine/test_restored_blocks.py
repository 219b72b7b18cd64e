"""Restored blocks until their request runs: which blocks are evicted before them, and what happens without room."""

import pytest

from holdfast.worker.engine import restores
from holdfast.worker.request import Priority
from tests.worker.engine.played_tier import PROMPT, SIZE, Played, bring, bring_back_as_all_others, finished

OTHER = tuple(range(40, 73))
IDLE = tuple(range(100, 133))


def bring_two_beside_a_kept_session(*, has_mistake: bool = False) -> Played:
    """Two prompts come back at a time to a cache of 24 blocks, which has 8 of a session that went on before."""
    played = Played(num_blocks=24)
    if has_mistake:
        bring_back_as_all_others(played.tier)
    played.submit("s", IDLE)
    played.run()
    played.submit("t", IDLE)
    played.run()
    played.tier.learn([*played.names(), *played.names(OTHER)], ())
    played.submit("a")
    played.submit("b", OTHER)
    assert list(played.mover.fetched) == [1, 2]
    played.tier.restores.note_piece(1)
    bring(played, 2)
    played.run()
    assert finished(played) == {"s", "t", "a", "b"}
    return played


def test_what_has_just_come_outlives_a_session_that_is_idle():
    assert bring_two_beside_a_kept_session().stats.num_prefix_hit_tokens == 3 * 32


def test_without_that_one_restore_evicts_what_the_other_has_brought():
    played = bring_two_beside_a_kept_session(has_mistake=True)
    assert played.stats.num_disk_hit_tokens == 64
    assert played.stats.num_prefix_hit_tokens < 3 * 32


def test_what_it_continues_outlives_what_was_used_since():
    """The oldest blocks in the cache are the beginning of the prompt whose end comes back."""
    played = Played(num_blocks=12)
    played.submit("begins", PROMPT[:17])
    played.run()
    played.submit("s", OTHER[:25])
    played.run()
    played.tier.learn(played.names()[4:], ())
    played.submit("a")
    assert played.mover.fetched == {1: played.names()[4:]}
    played.submit("other", (90, 91, 92, 93, 94))
    plan = played.core.scheduler.plan()
    played.core.commit(plan, played._runner.run(plan), 0.01)
    bring(played)
    played.run()
    assert finished(played) == {"begins", "s", "other", "a"}
    assert (played.stats.num_disk_hit_tokens, played.stats.num_prefix_hit_tokens) == (16, 32)


def small_without_room(**fields) -> Played:
    """A restore has begun, and a request that came later has taken its room."""
    small = Played(num_blocks=12)
    small.tier.learn(small.names(), ())
    small.submit("a", **fields)
    small.submit("b", tuple(range(100, 130)), priority=Priority.LOW if fields else Priority.NORMAL)
    plan = small.core.scheduler.plan()
    small.core.commit(plan, small._runner.run(plan), 0.01)
    small.tier.restores.note_piece(1)
    return small


def test_one_that_has_begun_waits_for_room():
    small = small_without_room()
    for number in range(10):
        small.core.tend_tier(10 * small.computing_s + number, 0.01)
    assert small.mover.num_taken == 0
    small.run()
    bring(small)
    small.run()
    assert finished(small) == {"a", "b"}
    assert small.stats.num_disk_hit_tokens == 8 * SIZE
    small.core.check_integrity()


@pytest.mark.parametrize(("fields", "longest_s"), [({}, restores.MAX_HELD_S + 1.0), ({"priority": Priority.HIGH}, 1.0)])
def test_it_does_not_wait_for_ever_and_beside_a_worse_class_no_longer_than_computing_takes(fields, longest_s):
    small = small_without_room(**fields)
    now = 0.0
    while small.mover.fetched[1]:
        now += 0.1
        small.core.tend_tier(now, 0.01)
    assert now == pytest.approx(longest_s, abs=0.2)
    small.run()
    assert finished(small) == {"a", "b"}
    assert small.mover.num_taken == 0
    small.core.check_integrity()

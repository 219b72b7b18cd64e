"""Prefixes from replicas whose blocks have other numbers of tokens: what is asked for, and what is made of it."""

from collections.abc import Sequence

import pytest

from holdfast.worker.block_hash import next_hash, root_hash
from holdfast.worker.engine.restore import Expected
from holdfast.worker.request import BlockSource
from tests.worker.engine.played_tier import PROMPT, SIZE, Played, finished

NUM_TOKENS = len(PROMPT)  # 33: eight blocks of 4 tokens, and one that is always computed


def names_of(block_size: int, num_blocks: int, prompt: Sequence[int] = PROMPT) -> list[bytes]:
    """As a replica with such blocks names them."""
    names, parent = [], root_hash("")
    for first in range(0, num_blocks * block_size, block_size):
        parent = next_hash(parent, prompt[first : first + block_size])
        names.append(b"k" + parent)
    return names


def source(block_size: int, num_tokens: int = 1000, *, is_computing: bool = False) -> BlockSource:
    return BlockSource("there:1", num_tokens, is_computing, block_size)


@pytest.mark.parametrize(
    ("block_size", "num_asked", "num_made"),
    [(2, 16, 8), (4, 8, 8), (8, 4, 8), (12, 2, 6), (16, 2, 8), (32, 1, 8), (33, 1, 8)],
)
def test_whole_blocks_of_the_other_replica_that_cover_whole_blocks_here_are_asked_for(block_size, num_asked, num_made):
    played = Played()
    played.submit("a", block_source=source(block_size))
    assert played.mover.asked == {1: names_of(block_size, num_asked)}
    made = played.names()[:num_made]
    assert played.tier.restores.settle(1, num_asked) == Expected(made, names_of(block_size, num_asked), 0)
    played.tier.restores.note_piece(1)
    played.idle()
    played.run()
    assert (finished(played), played.stats.num_received_tokens) == ({"a"}, num_made * SIZE)


def test_a_block_that_no_block_here_fits_into_is_not_asked_for():
    played = Played()
    played.submit("a", block_source=source(8, num_tokens=7))
    assert played.mover.asked == {}
    played.submit("b", block_source=source(34))
    assert played.mover.asked == {}


def test_what_is_here_already_is_skipped():
    """Three blocks of 4 tokens are: the next ones begin within the second block of 8."""
    played = Played()
    played.submit("before", PROMPT[:13])
    played.run()
    played.submit("a", block_source=source(8))
    theirs = names_of(8, 4)
    assert played.mover.asked == {1: theirs[1:]}
    assert played.tier.restores.settle(1, 3) == Expected(played.names()[3:], theirs[1:], 4)


@pytest.mark.parametrize(
    ("block_size", "num_sent", "num_made", "num_used"),
    [(8, 3, 6, 3), (12, 2, 6, 2), (2, 9, 4, 8), (2, 1, 0, 0), (16, 1, 4, 1), (16, 0, 0, 0)],
)
def test_a_replica_that_has_less_than_was_said_sends_that(block_size, num_sent, num_made, num_used):
    played = Played()
    played.submit("a", block_source=source(block_size))
    names, theirs = played.names()[:num_made], names_of(block_size, num_used)
    assert played.tier.restores.settle(1, num_sent) == (Expected(names, theirs, 0) if num_made else None)
    played.tier.restores.note_piece(1)
    played.idle()
    played.run()
    assert (finished(played), played.stats.num_received_tokens) == ({"a"}, num_made * SIZE)


def test_blocks_that_are_computed_now_are_asked_for_by_their_names_there():
    played = Played()
    played.submit("now", PROMPT[:13])
    played.run()
    played.submit("a", block_source=source(8, is_computing=True))
    assert played.mover.asked == {1: names_of(8, 4)[1:]}


def test_a_restore_that_has_waited_asks_for_what_is_then_missing():
    small = Played(num_blocks=12)
    small.submit("running", range(40, 73))
    plan = small.core.scheduler.plan()
    small.submit("a", block_source=source(8))
    assert small.mover.asked == {}, "it waits for room"
    small.core.commit(plan, small._runner.run(plan), 0.01)
    small.run()
    assert small.mover.asked == {1: names_of(8, 4)}

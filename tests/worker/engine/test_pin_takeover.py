"""Pins that a replica that leaves hands on: what is told and asked for, and what is pinned of it for how long."""

import pytest

from holdfast.worker.engine import block_tier
from holdfast.worker.request import BlockSource, KeptPrefix, PinnedPrefix, Priority
from tests.worker.engine.played_tier import PROMPT, SIZE, Played, bring, finished

THERE = "there:1"


def held_of(prompt=PROMPT, now: float = 0.0, **service) -> list[PinnedPrefix]:
    """Pins of a replica that has run one request."""
    leaving = Played(pinned_share=1.0)
    leaving.submit("kept", prompt, **service)
    leaving.run()
    return leaving.core.scheduler.pinning.held(now)


def pinned(played: Played) -> int:
    return len(played.core.scheduler.pinning._allocator.pins.by_block)


def flood(played: Played) -> None:
    for number in range(30):
        played.submit(f"other {number}", range(1000 * number + 100, 1000 * number + 133))
        played.run()


def test_what_is_pinned_is_told_with_the_rest_of_its_time():
    (prefix,) = held_of(now=60.0, cache_ttl_s=300, tenant="gold")
    assert (prefix.tenant, prefix.ttl_s, len(prefix.hashes)) == ("gold", 240.0, 1 + len(PROMPT) // SIZE)
    assert held_of(now=300.0, cache_ttl_s=300) == []


def test_a_shorter_prefix_is_told_where_it_is_kept_longer():
    marks = (KeptPrefix(3 * SIZE, 3600), KeptPrefix(5 * SIZE, 60))
    told = {(len(one.hashes) - 1, one.ttl_s) for one in held_of(cache_ttl_s=300, cache_marks=marks)}
    assert told == {(3, 3600.0), (8, 300.0)}


def test_a_prefix_is_asked_for_by_name_and_pinned_for_the_rest_of_its_time():
    played, taken = Played(num_blocks=40), held_of(now=60.0, cache_ttl_s=300)
    played.tier.takeover.take(taken, THERE, now=1000.0)
    assert played.mover.asked == {1: played.names()}
    assert pinned(played) == 0
    played.tier.restores.note_piece(1)
    played.idle(1001.0)
    assert (pinned(played), played.stats.num_received_tokens) == (8, 32)
    flood(played)
    played.submit("again", now=1239.0)
    played.run()
    assert next(one.num_cached_tokens for one in played.listener.deltas if one.attempt == "again") == 32
    assert pinned(played) == 8
    played.core.scheduler.pinning.end(1240.0)
    assert pinned(played) == 0


def test_what_is_here_is_pinned_at_once():
    played = Played()
    played.submit("before")
    played.run()
    played.tier.takeover.take(held_of(cache_ttl_s=300), THERE, now=0.0)
    assert (played.mover.asked, pinned(played)) == ({}, 8)


def test_of_a_transfer_that_is_cut_the_beginning_is_pinned():
    played, names = Played(), Played().names()
    played.mover.missing = set(names[5:])
    played.tier.takeover.take(held_of(cache_ttl_s=300), THERE, now=0.0)
    played.tier.restores.note_piece(1)
    played.tier.restores.cut(1)
    played.idle()
    assert pinned(played) == 5
    assert not played.tier.moves
    played.core.check_integrity()


def test_the_budget_is_that_of_the_replica_that_takes_over():
    played = Played(num_blocks=64, pinned_share=0.05)
    played.tier.takeover.take(held_of(cache_ttl_s=300), THERE, now=0.0)
    bring(played)
    assert pinned(played) == 3


def test_a_few_are_asked_for_at_a_time_and_those_whose_time_is_up_not_at_all(monkeypatch):
    monkeypatch.setattr(block_tier, "MAX_OPEN", 1)
    prompts = [PROMPT, [one + 50 for one in PROMPT], [one + 90 for one in PROMPT]]
    taken = [held_of(prompt, cache_ttl_s=ttl_s)[0] for prompt, ttl_s in zip(prompts, (300, 5, 300), strict=True)]
    played = Played()
    played.tier.takeover.take(taken, THERE, now=0.0)
    assert list(played.mover.asked) == [1]
    played.tier.restores.note_piece(1)
    played.idle(6.0)
    assert played.mover.asked == {1: played.names(prompts[0]), 2: played.names(prompts[2])}


def test_no_request_waits_for_a_prefix_that_is_taken_over():
    played = Played(computing_s=0.001)
    played.tier.takeover.take(held_of(cache_ttl_s=300), THERE, now=0.0)
    played.submit("a", block_source=BlockSource(THERE, 1000))
    played.run()
    assert finished(played) == {"a"}
    bring(played)
    assert pinned(played) == 8
    played.core.check_integrity()


def test_it_waits_for_room_behind_requests_and_is_given_up_at_last():
    played = Played(num_blocks=12)
    played.submit("running", range(40, 60), priority=Priority.LOW)
    plan = played.core.scheduler.plan()
    assert plan is not None
    played.tier.takeover.take(held_of(cache_ttl_s=300), THERE, now=0.0)
    played.idle(29.0)
    assert (played.mover.asked, len(played.tier.moves)) == ({}, 1)
    played.idle(30.0)
    assert not played.tier.moves


@pytest.mark.parametrize("way", ["other weights", "no transfers"])
def test_it_is_dropped(way):
    played = Played()
    played.mover.can_ask = way != "no transfers"
    played.tier.takeover.take(held_of(cache_ttl_s=300), THERE, now=0.0)
    if way == "other weights":
        played.core.forget_cache()
    played.idle()
    assert (pinned(played), played.tier.moves) == (0, set())


@pytest.mark.parametrize("whole", [True, False])
def test_what_an_operator_ends_is_not_pinned_once_it_comes(whole):
    played, taken = Played(num_blocks=40), held_of(cache_ttl_s=300)
    played.tier.takeover.take(taken, THERE, now=0.0)
    pinning = played.core.scheduler.pinning
    pinning.unpin_all("another")
    pinning.unpin("", bytes(16))
    if whole:
        pinning.unpin_all("")
    else:
        pinning.unpin("", taken[0].hashes[-1])
    played.tier.restores.note_piece(1)
    played.idle(1.0)
    assert (pinned(played), played.stats.num_received_tokens) == (0, 32)

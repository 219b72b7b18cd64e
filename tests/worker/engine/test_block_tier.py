"""What goes below the cache and comes back: when, how much, and who waits for it; with a store that the test plays."""

import math

import pytest

from holdfast.worker.engine import restores
from holdfast.worker.request import FinishReason, Priority
from tests.worker.engine.played_tier import (
    PROMPT,
    SIZE,
    Played,
    bring,
    finished,
)


@pytest.fixture
def played() -> Played:
    """Its store has the prompt's blocks, and its cache has none."""
    played = Played()
    played.tier.learn(played.names(), ())
    return played


def test_a_request_waits_for_its_blocks_and_finds_them(played):
    played.submit("a")
    played.run()
    assert not finished(played)
    assert played.mover.fetched == {1: played.names()}
    bring(played)
    played.run()
    assert finished(played) == {"a"}
    assert (played.stats.num_prefix_hit_tokens, played.stats.num_disk_hit_tokens) == (32, 32)
    first = played.listener.deltas[0]
    assert (first.num_cached_tokens, first.num_disk_tokens) == (32, 32)


def test_what_is_sooner_computed_is_computed(played):
    played.computing_s = 0.004  # reading 8 blocks takes 16 ms
    played.submit("a")
    played.run()
    assert (finished(played), played.mover.fetched) == ({"a"}, {})


def test_two_that_want_the_same_wait_together(played):
    played.submit("a")
    played.submit("b", (*PROMPT[:-1], 99))
    assert len(played.mover.fetched) == 1
    bring(played)
    played.run()
    assert finished(played) == {"a", "b"}
    assert played.stats.num_prefix_hit_tokens == 64


@pytest.mark.parametrize("fields", [{"tenant": "other"}, {"cache_salt": "other"}])
def test_nobody_waits_for_blocks_of_another_tenant_or_salt(played, fields):
    played.submit("a", **fields)
    played.run()
    assert (finished(played), played.mover.fetched) == ({"a"}, {})


def test_nobody_waits_longer_than_computing_takes(played):
    played.submit("a", now=10.0)
    played.idle(now=10.9)
    assert not played.core.scheduler.has_work
    assert played.core.most_idle_s(10.9, 60.0) == pytest.approx(0.1)
    played.idle(now=11.0)
    played.run()
    assert finished(played) == {"a"}
    assert played.mover.fetched == {1: ()}, "it is not wanted any more"
    bring(played)  # late
    assert played.mover.num_taken == 0


def test_before_anything_was_measured_the_store_is_believed_and_not_for_ever(played):
    played.computing_s = math.inf
    played.submit("a", now=5.0)
    assert played.core.most_idle_s(5.0, math.inf) == restores.MAX_HELD_S


@pytest.mark.parametrize("number", [0, 3, 7])
def test_a_block_that_is_missing_ends_it_there(played, number):
    played.mover.missing = {played.names()[number]}
    played.submit("a")
    bring(played)
    played.run()
    assert finished(played) == {"a"}
    assert played.stats.num_prefix_hit_tokens == played.stats.num_disk_hit_tokens == number * SIZE
    played.submit("b", (*PROMPT, 5))
    played.run()
    assert finished(played) == {"a", "b"}, "what was missing is not asked for again"


def test_one_that_is_aborted_or_whose_listener_leaves_does_not_wait(played):
    played.submit("a")
    played.core.abort("a")
    played.idle()
    (delta,) = played.listener.deltas
    assert (delta.attempt, delta.finish_reason) == ("a", FinishReason.ABORT)
    played.submit("b")
    played.core.detach(played.listener)
    assert played.mover.fetched == {1: (), 2: ()}
    assert not played.core.scheduler.has_work
    played.core.check_integrity()


OTHER = tuple(range(40, 73))
"""As long as `PROMPT`: a cache of 12 blocks has room for one of them."""


def small_with_both() -> Played:
    small = Played(num_blocks=12)
    small.tier.learn([*small.names(), *small.names(OTHER)], ())
    small.submit("a")
    small.submit("b", OTHER)
    return small


def test_a_restore_that_does_not_fit_beside_another_waits_for_room():
    small = small_with_both()
    assert list(small.mover.fetched) == [1], "the second one waits"
    bring(small)
    small.run()
    assert finished(small) == {"a"}
    assert small.mover.fetched[2] == small.names(OTHER)
    bring(small, 2)
    small.run()
    assert finished(small) == {"a", "b"}
    assert small.stats.num_disk_hit_tokens == 64


def test_restores_that_begin_without_room_evict_each_others_blocks(monkeypatch):
    monkeypatch.setattr(restores.Restores, "_has_room", lambda self, restore: True)
    small = small_with_both()
    small.tier.restores.note_piece(1)
    bring(small, 2)
    small.run()
    assert finished(small) == {"a", "b"}
    assert small.stats.num_prefix_hit_tokens < 64


@pytest.mark.parametrize("worse_runs", [False, True])
def test_beside_a_worse_class_nobody_waits_for_room_longer_than_computing_takes(worse_runs):
    small = Played(num_blocks=12)
    small.tier.learn(small.names(OTHER), ())
    small.submit("a", priority=Priority.LOW if worse_runs else Priority.NORMAL)
    plan = small.core.scheduler.plan()
    small.submit("b", OTHER)
    small.core.commit(plan, small._runner.run(plan), 0.01)
    small.core.tend_tier(small.computing_s - 0.1, 0.01)
    assert not small.mover.fetched
    assert small.core.scheduler.load().num_waiting == 0
    small.core.tend_tier(small.computing_s + 0.1, 0.01)
    assert small.core.scheduler.load().num_waiting == worse_runs
    small.run()
    if not worse_runs:
        bring(small)
        small.run()
    assert finished(small) == {"a", "b"}
    small.core.check_integrity()


def test_tenants_take_turns_in_waiting_for_room():
    small = Played(num_blocks=12)
    prompts = [tuple(range(first, first + len(PROMPT))) for first in (300, 400, 500, 600)]
    tenants = ["many", "many", "many", "one"]
    for prompt, tenant in zip(prompts, tenants, strict=True):
        small.tier.learn(small.names(prompt, tenant=tenant), ())
    for number, (prompt, tenant) in enumerate(zip(prompts, tenants, strict=True)):
        small.submit(f"{tenant}-{number}", prompt, tenant=tenant)
    for ticket in (1, 4, 2, 3):
        assert list(small.mover.fetched)[-1] == ticket
        bring(small, ticket)
        small.run()
    assert len(finished(small)) == 4
    assert small.stats.num_disk_hit_tokens == 4 * 32


@pytest.mark.parametrize(("priority", "waits"), [(Priority.LOW, True), (Priority.NORMAL, True), (Priority.HIGH, False)])
def test_a_restore_waits_behind_requests_of_its_class_and_better_ones_alone(priority, waits):
    played = Played(max_num_seqs=1)
    played.tier.learn(played.names(), ())
    for name in ("running", "waiting"):
        played.submit(name, (90, 91, 92))
    assert played.core.scheduler.plan() is not None
    assert played.core.scheduler.load().num_waiting == 1
    played.submit("a", priority=priority)
    assert (1 in played.mover.fetched) != waits


def test_running_requests_pay_a_share_of_their_steps_and_idle_time_is_free():
    played = Played()
    played.submit("a")
    played.run(step_s=0.01)  # 3 steps; a block costs 2 ms
    assert len(played.mover.stored) == 0
    played.submit("b", tuple(range(50, 60)))
    played.run(step_s=0.5)
    assert 4 <= len(played.mover.stored) <= 9
    played.idle()
    assert len(played.mover.stored) == len(set(played.mover.stored)) == 8 + 2
    assert played.stats.disk_backlog_bytes == 0


def test_what_the_store_has_or_had_no_time_for_is_not_copied():
    played = Played(num_blocks=10)
    played.mover.has_room = False
    played.submit("a")
    played.run()
    played.tier.learn(played.names()[:4], ())
    played.submit("b", tuple(range(100, 137)))
    played.run()
    assert played.stats.num_disk_losses == 4
    played.mover.has_room = True
    played.idle()
    assert not set(played.mover.stored) & set(played.names())


def test_followers_hear_of_what_can_be_had_here_or_there(played):
    names = played.names()
    hashes = {name[1:] for name in names}
    assert set(played.tier.block_hashes) == hashes
    played.submit("a")
    bring(played)
    played.run()
    assert played.tier.seen((), ()) == ([], []), "that the store has them was told before"
    played.tier.learn((), names[:2])
    assert played.tier.seen((), ()) == ([], []), "the cache has them still"
    played.tier.forget()
    assert not list(played.tier.block_hashes)


def test_the_known_answers_blocks_stay_here():
    """A replica asks itself the same again and again, each time under a salt of its own."""
    played = Played()
    played.core.numbers_check = played.listener
    played.submit("a", cache_salt="own/1")
    played.run()
    played.core.numbers_check = None
    played.submit("b")
    played.run()
    played.idle()
    assert sorted(played.mover.stored) == sorted(played.names())


def test_what_is_pinned_is_kept_in_the_store_as_long():
    played = Played()
    played.submit("a", cache_ttl_s=300, tenant="gold")
    played.run()
    played.idle()
    names = played.names(tenant="gold")
    assert played.mover.kept == {"gold": (names, 300.0)}
    assert played.mover.stored[: len(names)] == names


def test_what_is_unpinned_is_kept_in_the_store_no_longer():
    played = Played()
    played.submit("a", cache_ttl_s=300, tenant="gold")
    played.run()
    names, pinning = played.names(tenant="gold"), played.core.scheduler.pinning
    assert pinning.unpin("gold", names[-1][1:]) == 8
    played.idle()
    assert set(names) < set(played.mover.kept["gold"][0]), "snapshots are named as well"
    assert played.mover.kept["gold"][1] == 0.0
    pinning.unpin_all("free")
    played.idle()
    assert played.mover.kept["free"] == ([], 0.0)

"""Pins that an operator ends: of one prefix or of a tenant, and what other pinned prefixes keep."""

import random

import pytest

from holdfast.worker.block_hash import HashChain
from holdfast.worker.cache.pins import Pins
from holdfast.worker.model_info import Window
from holdfast.worker.request import KeptPrefix
from tests.worker.scheduler.pseudo_machine import Machine, tokens
from tests.worker.scheduler.test_pins import flood, pinned, prompt_of, run, scheduler_of
from tests.worker.schedulers import BLOCK_SIZE, make_request, step


def held(scheduler, now=0.0):
    """Pinned prefixes by their lengths in blocks, with the seconds that are left."""
    return {len(one.hashes) - 1: one.ttl_s for one in scheduler.pinning.held(now)}


def last_hash(scheduler, num_blocks):
    (found,) = (one.hashes[-1] for one in scheduler.pinning.held(0.0) if len(one.hashes) - 1 == num_blocks)
    return found


def ask(scheduler, prompt, **service):
    scheduler.add(make_request("r", prompt=prompt, max_tokens=1, **service), 0.0)
    while scheduler.has_work:
        step(scheduler)


def test_all_pins_of_a_tenant_end_and_no_others():
    scheduler = scheduler_of()
    for number, tenant in ((1, "a"), (2, "a"), (3, "b")):
        run(scheduler, number, tenant=tenant, cache_ttl_s=300)
    assert scheduler.pinning.unpin_all("a") == 8
    assert scheduler.pinning.unpin_all("nobody") == 0
    scheduler.check_integrity()
    flood(scheduler)
    assert [run(scheduler, number, tenant=tenant) for number, tenant in ((1, "a"), (2, "a"), (3, "b"))] == [0, 0, 4]


def test_one_prefix_ends_and_its_blocks_stay_cached():
    scheduler = scheduler_of()
    run(scheduler, 1, cache_ttl_s=300)
    run(scheduler, 2, num_blocks=3, cache_ttl_s=300)
    assert scheduler.pinning.unpin("", last_hash(scheduler, 4)) == 4
    assert (held(scheduler), scheduler.stats().num_cached_blocks) == ({3: 300.0}, 7)
    flood(scheduler)
    assert (run(scheduler, 1), run(scheduler, 2, num_blocks=3)) == (0, 3)


def test_a_prefix_of_another_tenant_does_not_end():
    scheduler = scheduler_of()
    run(scheduler, 1, tenant="a", cache_ttl_s=300)
    wanted = last_hash(scheduler, 4)
    assert (scheduler.pinning.unpin("b", wanted), scheduler.pinning.unpin("a", bytes(16))) == (0, 0)
    assert pinned(scheduler) == 4


def test_what_another_pinned_prefix_contains_stays_as_long_as_that():
    scheduler = scheduler_of()
    common = prompt_of(1, 4)[:-1]
    ask(scheduler, (*common, *prompt_of(2, 1)), cache_ttl_s=300)
    ask(scheduler, (*common, *prompt_of(3, 2)), cache_ttl_s=60)
    assert held(scheduler) == {5: 300.0, 6: 60.0}
    assert scheduler.pinning.unpin("", last_hash(scheduler, 5)) == 1
    scheduler.check_integrity()
    assert held(scheduler) == {6: 60.0}
    scheduler.pinning.end(60.0)
    scheduler.check_integrity()
    assert pinned(scheduler) == 0


def test_a_shorter_prefix_that_is_kept_longer_stays():
    scheduler = scheduler_of()
    marks = (KeptPrefix(2 * BLOCK_SIZE, 3600),)
    run(scheduler, 1, cache_ttl_s=60, cache_marks=marks)
    assert held(scheduler) == {2: 3600.0, 4: 60.0}
    assert scheduler.pinning.unpin("", last_hash(scheduler, 4)) == 2
    assert held(scheduler) == {2: 3600.0}


@pytest.mark.parametrize("options", [{"num_slots": 4, "num_blocks": 200}, {"num_blocks": 120}], ids=["state", "window"])
@pytest.mark.parametrize("whole", [True, False])
def test_states_and_blocks_of_windows_end_with_the_prefix(options, whole):
    if "num_slots" not in options:
        options = options | {"window": Window(num_tokens=40, block_size=8, spacing=16), "block_size": 8}
    machine = Machine(**options)
    machine.add("first", tokens(1, 90), num_tokens=1, cache_ttl_s=300)
    machine.run()
    pinning = machine.scheduler.pinning
    allocator, slots = machine.scheduler.caches
    (prefix,) = pinning.held(0.0)
    assert slots is None or slots._allocator.pins.by_block
    if whole:
        pinning.unpin_all("")
    else:
        pinning.unpin("", prefix.hashes[-1])
    assert not allocator.pins.by_block
    assert slots is None or not slots._allocator.pins.by_block
    machine.scheduler.check_integrity()


def test_at_random_what_is_left_is_what_the_others_pin():
    """Prefixes of a tree are pinned, and one is unpinned: each block is pinned as long as the longest of the others."""
    rng = random.Random(35)
    for _ in range(60):
        scheduler = scheduler_of(pinned_share=1.0)
        wanted = {tuple(rng.randrange(2) for _ in range(rng.randrange(1, 5))): 0 for _ in range(5)}
        for path in wanted:
            wanted[path] = rng.randrange(1, 1000)
            ask(scheduler, (*prompt_to(path), 9), cache_ttl_s=wanted[path])
        assert lasting(scheduler) == expected(wanted)
        ends = {one.hashes[-1] for one in scheduler.pinning.held(0.0)}
        gone = rng.choice([path for path in wanted if hash_of(path) in ends])
        scheduler.pinning.unpin("", hash_of(gone))
        scheduler.check_integrity()
        left = {path: ttl_s for path, ttl_s in wanted.items() if gone[: len(path)] != path or ttl_s > wanted[gone]}
        assert lasting(scheduler) == expected(left)


def prompt_to(path):
    return sum((prompt_of(1 + 2 * depth + turn, 1)[:-1] for depth, turn in enumerate(path)), ())


def hash_of(path):
    return HashChain("").hash_of(len(path) - 1, prompt_to(path), BLOCK_SIZE)


def expected(wanted):
    blocks = {path[:depth] for path in wanted for depth in range(1, len(path) + 1)}
    return {
        hash_of(block): max(ttl_s for path, ttl_s in wanted.items() if path[: len(block)] == block) for block in blocks
    }


def lasting(scheduler):
    allocator, _ = scheduler.caches
    contents = allocator.prefix_cache.contents
    return {contents[block_id].block_hash: pin.until_s for block_id, pin in allocator.pins.by_block.items()}


def test_planted_a_pin_that_is_not_shortened_lasts_too_long(monkeypatch):
    monkeypatch.setattr(Pins, "shorten", lambda *_: None)
    with pytest.raises(AssertionError):
        test_what_another_pinned_prefix_contains_stays_as_long_as_that()

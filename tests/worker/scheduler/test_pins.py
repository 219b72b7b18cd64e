"""Prefixes that requests ask to keep: evicted last until their time is up, within a budget for each tenant."""

import random

import pytest

from holdfast.worker.cache.pins import Pins
from holdfast.worker.model_info import Window
from holdfast.worker.request import KeptPrefix
from tests.worker.scheduler.pseudo_machine import Machine, tokens
from tests.worker.schedulers import BLOCK_SIZE, make_request, make_scheduler, step

NUM_BLOCKS = 32


def scheduler_of(**config):
    return make_scheduler(num_blocks=NUM_BLOCKS, prefix_caching=True, **config)


def prompt_of(number, num_blocks=4):
    """Full blocks, and one token more."""
    return tuple(range(1000 * number, 1000 * number + num_blocks * BLOCK_SIZE + 1))


def run(scheduler, number, now=0.0, *, num_blocks=4, **service):
    """Runs one request; returns how many blocks it found."""
    request = make_request("r", prompt=prompt_of(number, num_blocks), max_tokens=1, **service)
    scheduler.add(request, now)
    deltas = []
    while scheduler.has_work:
        deltas += step(scheduler, now=now)[1]
    return deltas[0].num_cached_tokens // BLOCK_SIZE


def flood(scheduler, now=0.0, *, tenant="other"):
    """Other prompts, as many blocks as there are, and once more."""
    for number in range(100, 100 + 2 * NUM_BLOCKS // 8):
        run(scheduler, number, now, num_blocks=8, tenant=tenant)


def pinned(scheduler):
    return scheduler.stats().num_pinned_blocks


def test_a_prefix_stays_until_its_time_is_up():
    scheduler = scheduler_of()
    assert run(scheduler, 1, now=0.0, cache_ttl_s=300) == 0
    run(scheduler, 2, now=0.0)
    flood(scheduler, now=299.0)
    assert pinned(scheduler) == 4
    assert (run(scheduler, 1, now=299.0), run(scheduler, 2, now=299.0)) == (4, 0)
    flood(scheduler, now=300.0)
    assert (pinned(scheduler), run(scheduler, 1, now=300.0)) == (0, 0)


def test_a_hit_that_asks_again_renews_and_one_that_asks_for_less_shortens_nothing():
    scheduler = scheduler_of()
    run(scheduler, 1, now=0.0, cache_ttl_s=300)
    assert run(scheduler, 1, now=200.0, cache_ttl_s=300) == 4
    run(scheduler, 1, now=201.0, cache_ttl_s=1)
    flood(scheduler, now=499.0)
    assert run(scheduler, 1, now=499.0) == 4
    flood(scheduler, now=500.0)
    assert run(scheduler, 1, now=500.0) == 0


def test_a_part_of_the_prompt_is_kept():
    scheduler = scheduler_of()
    run(scheduler, 1, cache_ttl_s=300, cache_prefix_tokens=2 * BLOCK_SIZE + 3)
    assert pinned(scheduler) == 2
    flood(scheduler)
    assert run(scheduler, 1) == 2


def test_each_mark_is_kept_for_its_own_time():
    scheduler = scheduler_of()
    run(scheduler, 1, cache_marks=(KeptPrefix(4 * BLOCK_SIZE, 10), KeptPrefix(2 * BLOCK_SIZE, 500)))
    assert pinned(scheduler) == 4
    flood(scheduler, now=5.0)
    assert run(scheduler, 1, now=5.0) == 4
    flood(scheduler, now=20.0)
    assert run(scheduler, 1, now=20.0) == 2


def test_beyond_the_budget_the_oldest_pins_of_the_tenant_give_way_and_no_others():
    scheduler = scheduler_of()  # 8 blocks for each tenant
    run(scheduler, 1, tenant="a", cache_ttl_s=300)
    run(scheduler, 2, tenant="b", cache_ttl_s=300)
    for number in (3, 4):
        run(scheduler, number, tenant="b", cache_ttl_s=300)
    assert pinned(scheduler) == 4 + 8
    flood(scheduler)
    assert [run(scheduler, number, tenant=tenant) for number, tenant in ((1, "a"), (3, "b"), (4, "b"))] == [4, 4, 4]
    assert run(scheduler, 2, tenant="b") == 0


def test_of_a_prefix_beyond_the_budget_the_beginning_is_kept():
    scheduler = scheduler_of()
    run(scheduler, 1, num_blocks=12, cache_ttl_s=300)
    assert pinned(scheduler) == 8
    flood(scheduler)
    assert run(scheduler, 1, num_blocks=12) == 8


@pytest.mark.parametrize("config", [{"pinned_share": 0.0}, {"pinned_share": 0.02}])
def test_a_share_of_no_block_keeps_nothing(config):
    scheduler = scheduler_of(**config)
    run(scheduler, 1, cache_ttl_s=300)
    assert pinned(scheduler) == 0


def test_pins_hold_up_no_sequence_and_count_as_free():
    scheduler = scheduler_of(pinned_share=1.0)
    for number in range(NUM_BLOCKS // 4):
        run(scheduler, number, cache_ttl_s=300)
    assert (pinned(scheduler), scheduler.load().num_free_blocks) == (NUM_BLOCKS - 1, NUM_BLOCKS)
    run(scheduler, 50, num_blocks=20)
    assert pinned(scheduler) == NUM_BLOCKS - 21


def test_a_sequence_without_finite_logits_leaves_no_pin():
    scheduler = scheduler_of()
    scheduler.add(make_request("r", prompt=prompt_of(1), max_tokens=9, cache_ttl_s=300), 0.0)
    step(scheduler)
    assert pinned(scheduler) == 4
    scheduler._drop_broken(scheduler._queues.running[0])
    assert pinned(scheduler) == 0
    scheduler.forget_cache()
    scheduler.check_integrity()


def test_with_other_weights_all_pins_are_gone():
    scheduler = scheduler_of()
    run(scheduler, 1, cache_ttl_s=300)
    scheduler.forget_cache()
    scheduler.check_integrity()
    assert pinned(scheduler) == 0


def test_a_snapshot_of_the_state_is_kept_with_the_blocks():
    def num_cached(machine, name, prompt, **service):
        machine.add(name, prompt, num_tokens=1, **service)
        machine.run()
        return machine.scheduler.stats().num_snapshot_hits

    kept, lost = (Machine(num_slots=4, num_blocks=200) for _ in range(2))
    for machine, ttl in ((kept, 300), (lost, 0)):
        num_cached(machine, "first", tokens(1, 90), cache_ttl_s=ttl)
        for number in range(9):
            num_cached(machine, f"other {number}", tokens(10 + number, 90))
    assert [num_cached(machine, "again", tokens(1, 90)) for machine in (kept, lost)] == [1, 0]


@pytest.mark.parametrize("size", [8, 16])
def test_blocks_of_windows_are_kept_with_the_others(size):
    window = Window(num_tokens=40, block_size=size, spacing=16)
    num_hits = []
    for ttl in (300, 0):
        machine = Machine(window=window, block_size=8, num_blocks=120)
        for number, name in ((1, "first"), *((10 + each, f"other {each}") for each in range(12)), (1, "again")):
            hits = machine.scheduler.stats().num_prefix_hit_tokens
            machine.add(name, tokens(number, 90), num_tokens=1, cache_ttl_s=ttl * (number == 1))
            machine.run()
        num_hits.append(machine.scheduler.stats().num_prefix_hit_tokens - hits)
    assert num_hits == [80, 0]


def test_at_random_pins_agree_with_blocks():
    rng = random.Random(34)
    scheduler, now = scheduler_of(aging_s=1e9), 0.0
    for number in range(150):
        now += rng.random() * 20
        service = {"tenant": rng.choice("ab"), "cache_ttl_s": rng.choice((0, 1, 60, 300))}
        prompt = prompt_of(rng.randrange(5), rng.randrange(1, 7)) + prompt_of(number + 10, rng.randrange(3))
        scheduler.add(make_request(f"{number}", prompt=prompt, max_tokens=rng.randrange(1, 9), **service), now)
        for _ in range(rng.randrange(5)):
            if scheduler.has_work:
                step(scheduler, now=now)
        if rng.random() < 0.1:
            scheduler.abort(f"{number}")
    while scheduler.has_work:
        step(scheduler, now=now)
    run(scheduler, 999, now + 301)
    assert pinned(scheduler) == 0


# --- planted mistakes ---


def several(scheduler, number):
    for each in range(number):
        run(scheduler, each, cache_ttl_s=300)


def test_a_pin_that_leaks_is_found(monkeypatch):
    monkeypatch.setattr(Pins, "drop", lambda self, block_id: None)
    scheduler = scheduler_of(pinned_share=1.0)
    several(scheduler, NUM_BLOCKS // 4)
    with pytest.raises(AssertionError, match="a pinned block is not cached"):
        run(scheduler, 50, num_blocks=20)


def test_a_pin_without_an_end_is_found(monkeypatch):
    monkeypatch.setattr(Pins, "_look_at", lambda self, block_id, at: None)
    with pytest.raises(AssertionError, match="has no end"):
        several(scheduler_of(), 1)


def test_pins_beyond_the_budget_are_found(monkeypatch):
    put = Pins.put

    def greedy(pins, *args):
        budget, pins.budget = pins.budget, NUM_BLOCKS
        gave_way = put(pins, *args)
        pins.budget = budget
        return gave_way

    monkeypatch.setattr(Pins, "put", greedy)
    with pytest.raises(AssertionError, match="has 12 pins of 8"):
        several(scheduler_of(), 3)


def test_another_tenants_pin_is_found():
    pins = Pins(budget=2)
    pins.put([0], "a", 1.0)
    with pytest.raises(AssertionError, match="pinned for another tenant"):
        pins.put([0], "b", 1.0)

"""Prefixes are known by their tokens, found as long as they are kept, and told to whoever asks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.worker.block_hash import HashChain, next_hash, root_hash
from holdfast.worker.cache.block_pool import BlockAllocator
from holdfast.worker.cache.prefix_cache import BlockEvicted, BlockStored, PrefixCache
from holdfast.worker.request import Priority
from tests.examples import examples
from tests.pseudo_model import PseudoRunner, pseudo_completion
from tests.worker.schedulers import BLOCK_SIZE, make_request, make_scheduler, members, run_to_end, shares, step

# --- Hashes ---


def test_hashes_are_the_same_in_every_process():
    assert root_hash("").hex() == "cae66941d9efbd404e4d88758ea67670"
    assert next_hash(root_hash("tenant"), [1, 2, 3]).hex() == "175c7fe4e9b847e23f3a1fd2a80d8325"


def test_a_hash_knows_the_tokens_their_order_what_was_before_and_the_salt():
    hashes = [
        next_hash(next_hash(root_hash(salt), first), second)
        for salt, first, second in (
            ("", [1, 2], [3, 4]),
            ("a", [1, 2], [3, 4]),
            ("", [1, 3], [3, 4]),
            ("", [1, 2], [4, 3]),
            ("", [1, 2], [3, 4, 0]),
        )
    ]
    assert len(set(hashes)) == len(hashes)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(1, 5))
def test_a_chain_that_grows_with_its_tokens_is_that_of_all_of_them(token_ids, block_size):
    growing, whole = HashChain("salt"), HashChain("salt")
    for end in range(block_size, len(token_ids) + 1):
        growing.hash_of(end // block_size - 1, token_ids[:end], block_size)
    for index in range(-1, len(token_ids) // block_size):
        assert growing.hash_of(index, [], block_size) == whole.hash_of(index, token_ids, block_size)


# --- The table ---


def cache_with(token_ids, block_ids, salt="") -> PrefixCache:
    """A cache of two-token blocks that holds these."""
    cache = PrefixCache(2, enabled=True)
    store(cache, token_ids, block_ids, salt)
    return cache


def store(cache, token_ids, block_ids, salt=""):
    for index, block_id in enumerate(block_ids):
        cache.store(block_id, HashChain(salt), token_ids, index)


@pytest.mark.parametrize(
    ("token_ids", "max_num_blocks", "found"),
    [
        ([1, 2, 3, 4, 5, 6], 3, [7, 8, 9]),
        ([1, 2, 3, 4, 5, 6], 2, [7, 8]),
        ([1, 2, 3, 4, 6, 5], 3, [7, 8]),
        ([1, 2, 0, 4, 5, 6], 3, [7]),
        ([3, 4, 5, 6], 2, []),
    ],
    ids=["all", "as far as asked", "up to the last block", "up to a hole", "none from the middle"],
)
def test_the_longest_prefix_is_found(token_ids, max_num_blocks, found):
    assert cache_with([1, 2, 3, 4, 5, 6], [7, 8, 9]).find(HashChain(""), token_ids, max_num_blocks) == found


def test_nothing_is_found_under_another_salt():
    cache = cache_with([1, 2], [7], salt="a")
    assert [cache.find(HashChain(salt), [1, 2], 1) for salt in ("a", "b", "")] == [[7], [], []]


def test_the_first_of_two_copies_is_found_and_the_second_is_not_kept():
    cache = cache_with([1, 2], [7])
    store(cache, [1, 2], [8])
    assert cache.find(HashChain(""), [1, 2], 1) == [7]
    assert (7 in cache.contents, 8 in cache.contents) == (True, False)
    cache.check_integrity()


def test_an_evicted_block_is_not_found_nor_what_came_after_it():
    cache = cache_with([1, 2, 3, 4], [7, 8])
    cache.evict(7)
    assert cache.find(HashChain(""), [1, 2, 3, 4], 2) == []
    store(cache, [1, 2], [5])
    assert cache.find(HashChain(""), [1, 2, 3, 4], 2) == [5, 8]


def test_a_block_that_is_stored_twice_is_our_mistake():
    with pytest.raises(AssertionError, match="block 7 is stored and was written to again"):
        store(cache_with([1, 2], [7]), [3, 4], [7])


def test_check_integrity_finds_tables_that_differ():
    cache = cache_with([1, 2], [7])
    del cache.contents[7]
    with pytest.raises(AssertionError, match="tables of hashes and of blocks differ"):
        cache.check_integrity()


# --- What routers are told ---


def test_the_first_to_ask_is_told_all_that_is_there_and_then_what_came_and_went():
    cache = cache_with([1, 2, 3, 4], [7, 8])
    first, second = (HashChain("").hash_of(index, [1, 2, 3, 4], 2) for index in (0, 1))
    assert cache.take_events() == [
        BlockStored(block_hash=first, parent_hash=root_hash("")),
        BlockStored(block_hash=second, parent_hash=first),
    ]
    cache.evict(8)
    assert cache.take_events() == [BlockEvicted(block_hash=second)]
    assert cache.take_events() == []


def test_nothing_is_kept_for_those_who_never_ask():
    cache = cache_with([1, 2], [7])
    cache.evict(7)
    assert cache._changes is None


def test_what_came_and_went_in_between_is_not_told():
    cache = cache_with([1, 2], [7])
    cache.take_events()
    store(cache, [3, 4], [8])
    cache.evict(8)
    cache.evict(7)
    store(cache, [1, 2], [9])
    assert cache.take_events() == []
    cache.check_integrity()


# --- In the scheduler ---


def caching_scheduler(**config):
    return make_scheduler(prefix_caching=True, **config)


def computed(scheduler, request) -> int:
    """Tokens that are computed for a request, which runs to its end."""
    before = scheduler.stats().num_tokens_computed
    scheduler.add(request)
    run_to_end(scheduler)
    return scheduler.stats().num_tokens_computed - before


def test_a_second_request_computes_only_what_is_new():
    scheduler = caching_scheduler(num_blocks=300, max_model_len=1000, max_num_batched_tokens=64)
    document = tuple(range(1000, 1512))
    first, second = (make_request(name, prompt=(*document, ord(name), 1, 2), max_tokens=4) for name in "ab")
    assert computed(scheduler, first) == 515 + 3
    assert computed(scheduler, second) == 3 + 3
    stats = scheduler.stats()
    assert (stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens) == (2 * 515, 512)


def test_a_prompt_that_is_cached_whole_is_computed_in_its_last_block_to_draw_from():
    scheduler = caching_scheduler()
    assert computed(scheduler, make_request("a", prompt_len=8, max_tokens=1)) == 8
    assert computed(scheduler, make_request("b", prompt_len=8, max_tokens=1)) == 4
    assert computed(scheduler, make_request("c", prompt_len=9, max_tokens=1)) == 1


def test_a_later_turn_finds_the_tokens_that_were_generated_in_the_turn_before():
    scheduler = caching_scheduler()
    scheduler.add(make_request("a", prompt_len=6, max_tokens=7))
    run_to_end(scheduler)
    turn = (*range(100, 106), *[7] * 7, 9)
    assert computed(scheduler, make_request("b", prompt=turn, max_tokens=1)) == 14 - 12


def test_salts_keep_apart():
    scheduler = caching_scheduler()
    salts = ("", "a", "b", "a")
    requests = [make_request(str(i), prompt_len=9, max_tokens=1, salt=salt) for i, salt in enumerate(salts)]
    assert [computed(scheduler, request) for request in requests] == [9, 9, 9, 1]


def test_cached_prompt_tokens_are_told_with_the_first_token_and_only_there():
    scheduler = caching_scheduler()
    computed(scheduler, make_request("a", prompt_len=9, max_tokens=1))
    scheduler.add(make_request("b", prompt_len=9, max_tokens=3))
    assert [delta.num_cached_tokens for delta in run_to_end(scheduler)] == [8, 0, 0]
    scheduler.add(make_request("c", prompt_len=9, outputs=(7,), max_tokens=3))
    assert [delta.num_cached_tokens for delta in run_to_end(scheduler)] == [0, 0], "told by whoever drew token 0"


def test_a_continued_request_begins_with_its_cached_blocks_outputs_and_all():
    scheduler = caching_scheduler()
    computed(scheduler, make_request("a", prompt_len=6, max_tokens=7))
    scheduler.add(make_request("a", prompt_len=6, outputs=(7,) * 5, max_tokens=8))
    assert shares(step(scheduler)[0]) == [(1, 8, 3)]


def test_a_prefix_is_shared_while_its_first_owner_runs_on_but_not_before_it_is_computed():
    scheduler = caching_scheduler(max_num_batched_tokens=14)
    for name in "ab":
        scheduler.add(make_request(name, prompt_len=9))
    assert shares(step(scheduler)[0]) == [(0, 0, 9), (1, 0, 5)], "side by side each computes its own"
    scheduler.add(make_request("c", prompt_len=9))
    plan, _ = step(scheduler)
    assert shares(plan) == [(0, 9, 1), (1, 5, 4), (2, 8, 1)]
    assert plan.sequences[2].block_ids[:2] == plan.sequences[0].block_ids[:2]


def test_a_shared_prefix_leaves_room_for_more_sequences():
    scheduler = caching_scheduler(num_blocks=10)
    for name in "abcd":
        scheduler.add(make_request(name, prompt=(*range(100, 116), ord(name)), max_tokens=3))
        plan, _ = step(scheduler)
    assert members(plan) == [1, 2, 3], "four blocks in common, and one for each"
    assert scheduler.stats().num_used_blocks == 6


def test_a_preempted_sequence_comes_back_through_its_cached_blocks():
    scheduler = caching_scheduler(num_blocks=10)
    for name in "ab":
        scheduler.add(make_request(name, prompt=tuple(range(ord(name), ord(name) + 13)), max_tokens=12))
    while scheduler.stats().num_preemptions == 0:
        step(scheduler)
    while 1 not in members(plan := step(scheduler)[0]):
        pass
    assert shares(plan)[-1] == (1, 16, 5)
    assert scheduler.stats().num_tokens_recomputed == 4, "of the one block that was taken from it"


def test_stats_tell_used_cached_and_blank_blocks_apart():
    scheduler = caching_scheduler(num_blocks=4)
    scheduler.add(make_request("a", prompt_len=9, max_tokens=2))
    step(scheduler)
    stats = scheduler.stats()
    assert (stats.num_used_blocks, stats.num_cached_blocks, stats.num_free_blocks) == (3, 0, 1)
    run_to_end(scheduler)
    stats = scheduler.stats()
    assert (stats.num_used_blocks, stats.num_cached_blocks, stats.num_free_blocks) == (0, 2, 4)
    computed(scheduler, make_request("b", prompt=(1,) * 16, max_tokens=1))
    assert (scheduler.stats().num_cached_blocks, scheduler.stats().num_evictions) == (4, 2)


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    scheduler = caching_scheduler(num_blocks=4)
    computed(scheduler, make_request("a", prompt_len=16, max_tokens=1))
    computed(scheduler, make_request("b", prompt=(1,) * 8, max_tokens=1))
    assert computed(scheduler, make_request("c", prompt_len=16, max_tokens=1)) == 8


def test_a_session_that_goes_on_outlives_requests_that_come_once():
    """Fifty requests that nobody goes on from pass through a cache of twelve blocks, after each of its later turns."""
    scheduler = caching_scheduler(num_blocks=12)
    turn, found = tuple(range(100, 101 + 2 * BLOCK_SIZE)), []
    for number in range(4):
        num_computed = computed(scheduler, make_request(f"turn {number}", prompt=turn, max_tokens=1))
        found.append(len(turn) - num_computed)
        turn += tuple(range(1000 * number, 1000 * number + BLOCK_SIZE))
        for other in range(50 if number else 0):
            first = 10_000 + 100 * other
            prompt = tuple(range(first, first + 2 * BLOCK_SIZE + 1))
            computed(scheduler, make_request(f"{number} {other}", prompt=prompt, max_tokens=1))
        scheduler.check_integrity()
    assert found == [0, 2 * BLOCK_SIZE, 3 * BLOCK_SIZE, 4 * BLOCK_SIZE]


def test_extended_prefixes_take_a_share_of_the_cache_at_most():
    allocator = BlockAllocator(8, 2, prefix_caching=True)
    blocks = allocator.allocate(8)
    store(allocator.prefix_cache, list(range(16)), blocks)
    allocator.free(blocks, is_extended=True)
    allocator.check_integrity()
    assert sorted(allocator.allocate(2)) == blocks[-2:], "the last ones of it are as others are"


def test_an_abort_keeps_what_was_committed_and_not_what_was_under_way():
    scheduler = caching_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("a", prompt_len=12))
    step(scheduler)
    plan = scheduler.plan()
    scheduler.abort("a")
    assert scheduler.stats().num_cached_blocks == 0  # the step that is under way has them all until it is committed
    runner = PseudoRunner(64, BLOCK_SIZE)
    scheduler.commit(plan, runner.run(plan))
    assert scheduler.stats().num_cached_blocks == 1
    scheduler.check_integrity()


def test_switched_off_nothing_is_kept_and_nothing_hashed():
    scheduler = make_scheduler(prefix_caching=False)
    requests = [make_request(name, prompt_len=9, max_tokens=1) for name in "ab"]
    assert [computed(scheduler, request) for request in requests] == [9, 9]
    assert scheduler.stats().num_cached_blocks == 0
    assert scheduler.prefix_cache.take_events() == []


def test_routers_are_told_of_prefixes_through_the_scheduler():
    scheduler = caching_scheduler(num_blocks=3)
    assert scheduler.prefix_cache.take_events() == []
    computed(scheduler, make_request("a", prompt_len=8, max_tokens=1))
    first, second = scheduler.prefix_cache.take_events()
    assert (first.parent_hash, second.parent_hash) == (root_hash(""), first.block_hash)
    computed(scheduler, make_request("b", prompt=(1,) * 8, max_tokens=1))
    gone, *came = scheduler.prefix_cache.take_events()
    assert gone == BlockEvicted(block_hash=second.block_hash)
    assert [type(event) for event in came] == [BlockStored, BlockStored]


# --- Tokens ---

NUM_BLOCKS = 14
DOCUMENT = tuple(range(2000, 2020))


def run_with_arrivals(arrivals, aborts=(), *, prefix_caching=True):
    """What the pseudo-model gives requests that arrive, and are aborted by number, so many steps after one another."""
    scheduler = make_scheduler(num_blocks=NUM_BLOCKS, prefix_caching=prefix_caching, max_num_batched_tokens=16)
    runner = PseudoRunner(NUM_BLOCKS, BLOCK_SIZE)
    outputs = {request.request_id: [] for _, request in arrivals}
    events = [*((num_steps, request, None) for num_steps, request in arrivals), *((n, None, i) for n, i in aborts)]
    for num_steps, request, aborted in events:
        if request is not None:
            scheduler.add(request)
        else:
            scheduler.abort(str(aborted))
        run_steps(scheduler, runner, outputs, num_steps)
    run_steps(scheduler, runner, outputs, 1000)
    assert not scheduler.has_work
    assert scheduler.stats().num_used_blocks == 0
    return outputs, scheduler.stats()


def run_steps(scheduler, runner, outputs, num_steps):
    for _ in range(num_steps):
        if (plan := scheduler.plan()) is None:
            break
        scheduler.check_integrity()
        for delta in scheduler.commit(plan, runner.run(plan)):
            outputs[delta.attempt] += delta.token_ids
        scheduler.check_integrity()


def relative(number, *, length, salt="", priority=Priority.NORMAL, max_tokens=10):
    """A request that begins with so much of the document."""
    prompt = (*DOCUMENT[:length], number % 4)
    return make_request(
        str(number), prompt=prompt, salt=salt, priority=priority, seed=number, max_tokens=max_tokens, ignore_eos=True
    )


def test_tokens_are_the_same_with_and_without_and_less_is_computed():
    arrivals = [(i % 3, relative(i, length=6 + 4 * (i % 4), max_tokens=10 + i)) for i in range(12)]
    with_cache, stats = run_with_arrivals(arrivals)
    without, stats_without = run_with_arrivals(arrivals, prefix_caching=False)
    assert with_cache == without
    assert min(stats.num_preemptions, stats.num_evictions, stats.num_prefix_hit_tokens) > 0
    assert stats.num_tokens_computed < stats_without.num_tokens_computed


relatives = st.fixed_dictionaries(
    {
        "length": st.integers(1, len(DOCUMENT)),
        "salt": st.sampled_from(["", "", "tenant"]),
        "priority": st.sampled_from(Priority),
        "max_tokens": st.integers(1, 30),
    }
)


@settings(max_examples=examples(150), deadline=None)
@given(
    wishes=st.lists(st.tuples(st.integers(0, 5), relatives), min_size=2, max_size=8),
    aborts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=2),
)
def test_relatives_in_a_small_cache_each_get_the_tokens_that_are_theirs(wishes, aborts):
    arrivals = [(num_steps, relative(number, **wish)) for number, (num_steps, wish) in enumerate(wishes)]
    outputs, _ = run_with_arrivals(arrivals, aborts)
    aborted = {str(number) for _, number in aborts}
    for number, (_, request) in enumerate(arrivals):
        expected = pseudo_completion(request.prompt_token_ids, number, request.sampling_params.max_tokens, 1000)
        got = outputs[str(number)]
        assert got == (expected[: len(got)] if str(number) in aborted else expected)

"""Sequences of one request: one computes the prompt, the others share its blocks and copy the one they write to."""

from dataclasses import replace

import pytest

from holdfast.worker.request import EngineRequest
from holdfast.worker.scheduler.kept_prefixes import SharedPrefix
from holdfast.worker.scheduler.queues import SequenceQueues
from holdfast.worker.step_plan import BlockCopy
from tests.pseudo_model import PseudoRunner, pseudo_completion
from tests.worker.schedulers import BLOCK_SIZE, make_request, make_scheduler, members, run_to_end, shares, step

VOCAB = 1000


def group(number: int, prompt_len: int, group_id="g", **wish) -> list[EngineRequest]:
    """So many requests of one prompt, each with its own seed."""
    params = {"max_tokens": 12, "ignore_eos": True, **wish}
    requests = [make_request(f"{group_id}{i}", prompt_len, seed=i, **params) for i in range(number)]
    return [replace(request, group_id=group_id) for request in requests]


def add_all(scheduler, requests):
    for request in requests:
        assert scheduler.add(request) is None


def completed(scheduler, requests, num_blocks=64) -> dict[str, list[int]]:
    """What each request gets of the pseudo-model, with the outputs that it came with."""
    add_all(scheduler, requests)
    runner = PseudoRunner(num_blocks, BLOCK_SIZE, VOCAB)
    outputs = {request.request_id: list(request.output_token_ids) for request in requests}
    while (plan := scheduler.plan()) is not None:
        scheduler.check_integrity()
        for delta in scheduler.commit(plan, runner.run(plan)):
            outputs[delta.attempt] += delta.token_ids
    scheduler.check_integrity()
    return outputs


def expected(requests) -> dict[str, list[int]]:
    return {
        request.request_id: pseudo_completion(
            request.prompt_token_ids, request.sampling_params.seed, request.sampling_params.max_tokens, VOCAB
        )
        for request in requests
    }


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(("prompt_len", "num_copies"), [(512, 7), (511, 7), (513, 0)])
def test_eight_sequences_compute_their_prompt_once(prefix_caching, prompt_len, num_copies):
    scheduler = make_scheduler(
        num_blocks=400, max_model_len=1000, max_num_batched_tokens=2048, prefix_caching=prefix_caching
    )
    requests = group(8, prompt_len)
    add_all(scheduler, requests)
    num_prompt_blocks = -(-prompt_len // BLOCK_SIZE)
    assert shares(step(scheduler)[0]) == [(0, 0, prompt_len)]
    assert scheduler.stats().num_used_blocks == num_prompt_blocks
    plan, _ = step(scheduler)
    assert shares(plan) == [(0, prompt_len, 1), *((i, prompt_len - 1, 1) for i in range(1, 8))]
    assert len(plan.block_copies) == num_copies
    num_grown = prompt_len % BLOCK_SIZE == 0
    assert scheduler.stats().num_used_blocks == num_prompt_blocks + 7 + num_grown
    stats = scheduler.stats()
    assert (stats.num_tokens_computed, stats.num_forked_tokens) == (prompt_len + 7 + 1, 7 * (prompt_len - 1))
    run_to_end(scheduler)
    assert scheduler.stats().num_tokens_computed == prompt_len + 7 + 8 * 11


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("prompt_len", [1, 2, 4, 5, 6, 7, 33])
def test_each_gets_the_tokens_that_it_gets_alone(prompt_len, prefix_caching):
    requests = group(8, prompt_len)
    scheduler = make_scheduler(prefix_caching=prefix_caching, num_blocks=200)
    assert completed(scheduler, requests, 200) == expected(requests)
    assert scheduler.stats().num_forked_tokens == 7 * (prompt_len - 1)
    assert scheduler.stats().num_tokens_computed == prompt_len + 7 + 8 * 11


def test_copies_name_the_parents_last_block_and_what_it_holds_of_the_prompt():
    scheduler = make_scheduler()
    add_all(scheduler, group(3, 6))
    parent = step(scheduler)[0].sequences[0]
    plan, _ = step(scheduler)
    _, *forks = plan.sequences
    assert [fork.block_ids[0] for fork in forks] == [parent.block_ids[0]] * 2
    assert plan.block_copies == tuple(
        BlockCopy(source=parent.block_ids[1], destination=fork.block_ids[1], num_tokens=1) for fork in forks
    )
    assert len({parent.block_ids[1], *(fork.block_ids[1] for fork in forks)}) == 3
    assert step(scheduler)[0].block_copies == ()


def test_who_stands_behind_waiting_siblings_is_not_held_up():
    scheduler = make_scheduler(max_num_batched_tokens=12, max_num_seqs=4)
    add_all(scheduler, [*group(3, 8, "g"), *group(2, 2, "h"), make_request("z")])
    assert members(step(scheduler)[0]) == [0, 3, 5]
    assert members(step(scheduler)[0]) == [0, 3, 5, 1]
    run_to_end(scheduler)


def test_siblings_wait_for_a_prompt_that_comes_in_chunks_and_no_longer():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add_all(scheduler, group(2, 10))
    plans = [step(scheduler)[0] for _ in range(4)]
    assert [shares(plan) for plan in plans] == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 2)], [(0, 10, 1), (1, 9, 1)]]


def test_a_fork_needs_only_the_blocks_that_are_its_own():
    scheduler = make_scheduler(num_blocks=8)
    add_all(scheduler, group(2, 22, max_tokens=2))
    step(scheduler)
    assert scheduler.stats().num_free_blocks == 2
    assert shares(step(scheduler)[0]) == [(0, 22, 1), (1, 21, 1)]


def test_a_fork_is_not_admitted_without_room_for_its_copy():
    scheduler = make_scheduler(num_blocks=6)
    requests = group(2, 22, max_tokens=3)
    add_all(scheduler, requests)
    assert members(step(scheduler)[0]) == members(step(scheduler)[0]) == [0]
    assert len(run_to_end(scheduler)) == 1 + 3
    assert scheduler.stats().num_forked_tokens == 0


def test_once_no_sibling_runs_the_prompt_is_computed_again():
    scheduler = make_scheduler(max_num_seqs=1)
    requests = group(2, 9)
    assert completed(scheduler, requests) == expected(requests)
    assert scheduler.stats().num_forked_tokens == 0


@pytest.mark.parametrize("when", ["computing", "forked", "in flight"])
def test_an_aborted_sibling_takes_nothing_along(when):
    scheduler, runner = make_scheduler(max_num_batched_tokens=4), PseudoRunner(64, BLOCK_SIZE, VOCAB)
    requests = group(3, 6)
    add_all(scheduler, requests)
    outputs = {request.request_id: [] for request in requests[1:]}
    for number in range(60):
        if number == {"computing": 1, "forked": 3}.get(when):
            scheduler.abort("g0")
        plan = scheduler.plan()
        if plan is None:
            break
        result = runner.run(plan)
        if when == "in flight" and plan.block_copies:
            scheduler.abort("g0")
        for delta in scheduler.commit(plan, result):
            if delta.attempt != "g0":
                outputs[delta.attempt] += delta.token_ids
        scheduler.check_integrity()
    assert outputs == expected(requests[1:])
    assert (scheduler.stats().num_forked_tokens > 0, scheduler.stats().num_aborted) == (True, 1)


def test_a_continued_sibling_shares_all_of_the_prompt():
    requests = group(2, 6)
    outputs = expected(requests)
    requests[1] = replace(requests[1], output_token_ids=tuple(outputs["g1"][:3]))
    scheduler = make_scheduler()
    assert completed(scheduler, requests) == outputs
    assert scheduler.stats().num_forked_tokens == 6


def test_preempted_siblings_come_back_by_forking():
    requests = [*group(4, 9, max_tokens=24), make_request("long", 20, max_tokens=40, ignore_eos=True)]
    scheduler = make_scheduler(num_blocks=22)
    assert completed(scheduler, requests, 22) == expected(requests)
    stats = scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.num_forked_tokens > 3 * 8


def test_a_sibling_with_another_prompt_or_salt_is_none():
    first, second, third = group(3, 8)
    second = replace(second, cache_salt="other")
    third = replace(third, prompt_token_ids=(*third.prompt_token_ids[:-1], 5))
    scheduler = make_scheduler()
    assert completed(scheduler, [first, second, third]) == expected([first, second, third])
    assert scheduler.stats().num_forked_tokens == 0


def test_what_the_first_found_in_the_cache_is_what_all_say():
    scheduler = make_scheduler(prefix_caching=True)
    scheduler.add(make_request("before", 8, max_tokens=1))
    run_to_end(scheduler)
    add_all(scheduler, group(3, 10))
    deltas = [delta for delta in run_to_end(scheduler) if delta.first_token_index == 0]
    assert [delta.num_cached_tokens for delta in deltas] == [8, 8, 8]


def queues_of(number: int) -> SequenceQueues:
    """Queues in which the first of so many siblings has computed its prompt of six tokens."""
    scheduler = make_scheduler()
    add_all(scheduler, group(number, 6))
    step(scheduler)
    return scheduler._queues


def test_a_copy_of_a_copy_that_is_not_made_yet_is_one_of_the_original():
    queues = queues_of(3)
    parent, (second, third) = queues.running[0], list(queues.waiting)
    queues.admit(second, 2, SharedPrefix(parent.block_ids[:1], 5, parent))
    queues.admit(third, 2, SharedPrefix(second.block_ids[:1], 5, second))
    assert [copy.source for copy in queues.take_block_copies()] == [parent.block_ids[1]] * 2
    assert queues.take_block_copies() == ()


def test_a_fork_that_is_sent_back_before_the_step_copies_nothing():
    queues = queues_of(2)
    parent, fork = queues.running[0], queues.waiting.first()
    queues.admit(fork, 2, SharedPrefix(parent.block_ids[:1], 5, parent))
    queues.preempt(fork)
    queues.check_integrity()
    assert queues.take_block_copies() == ()


def test_check_integrity_finds_a_fork_that_owns_the_block_it_writes_to():
    queues = queues_of(2)
    parent, fork = queues.running[0], queues.waiting.first()
    queues.admit(fork, 2, SharedPrefix(parent.block_ids, 5))
    with pytest.raises(AssertionError, match="block 1 is shared before"):
        queues.check_integrity()

"""Bucketed batching: a static batch of sequences that may become about equally long."""

from benchmarks.bucketed_batching import BucketedBatching
from benchmarks.static_batching import StaticBatching
from holdfast.worker.request import Priority
from tests.worker.schedulers import make_request, make_scheduler, members, run_to_end, step


def test_a_batch_takes_the_bucket_of_the_first_in_the_order_of_service():
    scheduler = make_scheduler(make_policy=BucketedBatching)
    for request_id, max_tokens in (("a", 4), ("b", 3), ("c", 7), ("d", 8), ("e", 5)):
        scheduler.add(make_request(request_id, max_tokens=max_tokens))
    batches = []
    while scheduler.has_work:
        batch = sorted(members(step(scheduler)[0]))
        if batch not in batches and not any(set(batch) < set(before) for before in batches):
            batches.append(batch)
    assert batches == [[0, 2, 4], [1], [3]]


def test_a_better_class_is_in_the_next_batch():
    scheduler = make_scheduler(make_policy=BucketedBatching, max_num_seqs=1)
    scheduler.add(make_request("a", max_tokens=4))
    step(scheduler)
    scheduler.add(make_request("b", max_tokens=4))
    scheduler.add(make_request("c", max_tokens=20, priority=Priority.HIGH))
    order = [delta.attempt for delta in run_to_end(scheduler) if delta.finish_reason]
    assert order == ["a", "c", "b"]


def test_less_of_a_batch_idles_than_with_static_batching():
    steps = {}
    for make_policy in (StaticBatching, BucketedBatching):
        scheduler = make_scheduler(make_policy=make_policy, max_num_seqs=2)
        for number in range(8):
            scheduler.add(make_request(str(number), max_tokens=(2, 16)[number % 2]))
        run_to_end(scheduler)
        steps[make_policy] = scheduler.stats().num_steps
    assert steps == {StaticBatching: 4 * 16, BucketedBatching: 2 * 2 + 2 * 16}


def test_a_batch_holds_the_blocks_of_its_peak_so_nobody_is_preempted():
    scheduler = make_scheduler(make_policy=BucketedBatching, num_blocks=6)
    for request_id in "abc":
        scheduler.add(make_request(request_id, max_tokens=9))
    assert len(step(scheduler)[0].sequences) == 2
    run_to_end(scheduler)
    assert scheduler.stats().num_preemptions == 0

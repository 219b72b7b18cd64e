"""Memory-aware batching: admission by estimated peaks, so that memory preempts nobody while estimates hold."""

from holdfast.worker.request import Priority
from tests.worker.schedulers import make_request, make_scheduler, members, run_to_end, step


def test_only_those_run_together_whose_peaks_fit_together():
    scheduler = make_scheduler(policy="memory_aware", num_blocks=7)
    for request_id in "abc":
        scheduler.add(make_request(request_id, max_tokens=9))
    assert members(step(scheduler)[0]) == [0, 1], "three blocks each at their peak, and seven in all"
    run_to_end(scheduler)
    assert scheduler.stats().num_preemptions == 0


def test_continuous_batching_preempts_on_the_same_load():
    scheduler = make_scheduler(policy="continuous", num_blocks=7)
    for request_id in "abc":
        scheduler.add(make_request(request_id, max_tokens=9))
    run_to_end(scheduler)
    assert scheduler.stats().num_preemptions > 0


def finish_one(scheduler, num_tokens: int) -> None:
    scheduler.add(make_request("earlier", max_tokens=num_tokens))
    run_to_end(scheduler)


def test_the_lengths_that_finished_make_room_for_more_than_the_bounds_would():
    scheduler = make_scheduler(policy="memory_aware", num_blocks=12)
    finish_one(scheduler, 5)
    for request_id in "abc":
        scheduler.add(make_request(request_id, max_tokens=25))
    assert len(step(scheduler)[0].sequences) == 3, "two blocks each by the mean, seven by the bound"


def test_one_that_has_outrun_the_mean_counts_with_its_bound():
    scheduler = make_scheduler(policy="memory_aware", num_blocks=12)
    finish_one(scheduler, 2)
    scheduler.add(make_request("a", max_tokens=25))
    for _ in range(4):
        step(scheduler)
    scheduler.add(make_request("b", max_tokens=25))
    scheduler.add(make_request("c", prompt_len=17, max_tokens=1))
    assert len(step(scheduler)[0].sequences) == 2, "seven blocks for a, two for b"


def test_when_estimates_were_too_low_preemption_goes_on_and_all_end():
    scheduler = make_scheduler(policy="memory_aware", num_blocks=8)
    finish_one(scheduler, 1)
    for request_id in "abcd":
        scheduler.add(make_request(request_id, max_tokens=25))
    ended = {delta.attempt for delta in run_to_end(scheduler) if delta.finish_reason}
    assert ended == set("abcd")
    assert scheduler.stats().num_preemptions > 0


def test_an_aborted_output_does_not_count_as_a_length():
    scheduler = make_scheduler(policy="memory_aware", num_blocks=12)
    scheduler.add(make_request("aborted", max_tokens=25))
    step(scheduler)
    scheduler.abort("aborted")
    for request_id in "ab":
        scheduler.add(make_request(request_id, max_tokens=25))
    assert len(step(scheduler)[0].sequences) == 1


def test_a_better_class_preempts_as_in_continuous_batching():
    scheduler = make_scheduler(policy="memory_aware", num_blocks=7)
    for request_id in "ab":
        scheduler.add(make_request(request_id, max_tokens=9, priority=Priority.LOW))
    step(scheduler)
    scheduler.add(make_request("c", max_tokens=9, priority=Priority.HIGH))
    assert members(step(scheduler)[0]) == [0, 2]

"""Bugs of two plans in flight, planted one by one into the real code: each is found."""

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from holdfast.worker import pending_tokens
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.steps_in_flight import StepsInFlight
from holdfast.worker.scheduler import planned_step
from holdfast.worker.scheduler import prompt_outputs as prompt_logprobs
from holdfast.worker.scheduler.batching import ContinuousBatching
from holdfast.worker.scheduler.planned_step import DecodeBatch, ShareCommit, StepInFlight
from holdfast.worker.scheduler.queues import SequenceQueues
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.sequence import Sequence
from tests.worker import fake_device
from tests.worker.engine import test_two_plans, test_two_plans_ends, test_two_plans_on_a_thread
from tests.worker.engine.two_plans import serve
from tests.worker.scheduler.scheduler_machine import MAX_PROMPT_LOGPROBS
from tests.worker.scheduler.test_plans_ahead_properties import AheadMachine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def by_all_kinds_of_requests() -> None:
    for seed in range(60):
        one, two = serve(seed, two_plans=False), serve(seed, two_plans=True)
        for attempt in one.listener.ended:
            assert one.listener.output_of(attempt) == two.listener.output_of(attempt)


def by_random_orders() -> None:
    profile = settings(
        max_examples=150,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(AheadMachine, settings=profile)


@dataclass
class Bug:
    owner: Any
    name: str
    right: str
    wrong: str
    found: Callable[[], None]


BUGS = {
    "a block is free while the step ahead writes to it": Bug(
        SequenceQueues,
        "_free_or_hold",
        "if self._in_flight and any(sequence in members for members in self._in_flight):",
        "if False:",
        by_all_kinds_of_requests,
    ),
    "a block is never free again": Bug(SequenceQueues, "land", "if self._held:", "if False:", by_all_kinds_of_requests),
    "a token is delivered after a stop": Bug(
        DecodeBatch,
        "commit",
        "if sequence.status is not SequenceStatus.RUNNING:",
        "if False:",
        by_all_kinds_of_requests,
    ),
    "a share of its own is delivered after a stop": Bug(
        ShareCommit, "take", "if sequence.status is not SequenceStatus.RUNNING:", "if False:", by_random_orders
    ),
    "a pending token is not put in": Bug(
        pending_tokens, "with_tokens", "if token == PENDING else token", "", by_all_kinds_of_requests
    ),
    "a pending token of a share is not put in": Bug(
        pending_tokens, "_known_share", "if PENDING not in", "if PENDING in", by_all_kinds_of_requests
    ),
    "a pending token is another sequence's": Bug(
        pending_tokens,
        "with_tokens",
        "zip(before.sequences, result.token_ids, strict=True)",
        "zip(before.sequences, result.token_ids[::-1], strict=True)",
        by_all_kinds_of_requests,
    ),
    "an abort is lost": Bug(
        Scheduler,
        "abort",
        "if sequence is None:",
        "if sequence is None or len(self._in_flight) == 2:",
        by_random_orders,
    ),
    "a step is committed twice": Bug(
        Scheduler, "commit", "self._in_flight.pop(0)", "self._in_flight[0]", by_all_kinds_of_requests
    ),
    "the younger step is committed first": Bug(
        Scheduler, "commit", "self._in_flight.pop(0)", "self._in_flight.pop()", by_all_kinds_of_requests
    ),
    "the cache is given a block whose last token was not computed": Bug(
        SequenceQueues,
        "store_full_blocks",
        "range(first_position // block_size, end // block_size)",
        "range(first_position // block_size, len(sequence.token_ids) // block_size)",
        by_all_kinds_of_requests,
    ),
    "the cache keeps what is not finite": Bug(
        Scheduler,
        "_drop_broken",
        "self._queues.forget_prefix(sequence)",
        "pass",
        test_two_plans_ends.test_who_has_no_numbers_fails_alone_and_its_blocks_are_found_by_nobody,
    ),
    "who looks back does not wait": Bug(
        Sequence, "foresee", "(draws and self._looks_back)", "False", by_all_kinds_of_requests
    ),
    "prompt log-probabilities do not wait": Bug(
        Sequence, "foresee", "self.prompt_logprobs is not None or ", "", by_all_kinds_of_requests
    ),
    "who has waited waits for ever": Bug(
        Scheduler, "commit", "sequence.awaits_result = False", "pass", by_all_kinds_of_requests
    ),
    "who awaits a result is planned again": Bug(
        ContinuousBatching, "_split_running", "if sequence.awaits_result:", "if False:", by_all_kinds_of_requests
    ),
    "a length is not foreseen": Bug(
        Sequence,
        "foresee",
        "(draws and self.is_about_to_end)",
        "False",
        test_two_plans.test_the_last_token_of_a_length_is_foreseen_and_nothing_is_planned_after_it,
    ),
    "a plan ahead preempts for a place": Bug(
        ContinuousBatching,
        "schedule_ahead",
        "claim is not None and",
        "False and",
        test_two_plans_ends.test_a_better_class_gets_its_place_although_plans_ahead_preempt_nobody,
    ),
    "a plan ahead runs out of blocks": Bug(
        ContinuousBatching,
        "schedule_ahead",
        "len(grown_out) > queues.num_free",
        "False",
        test_two_plans_ends.test_nobody_is_preempted_before_a_result,
    ),
    "rows age twice": Bug(DecodeBatch, "commit", "if not was_foreseen:", "if True:", by_all_kinds_of_requests),
    "rows do not age": Bug(DecodeBatch, "foresee", "self._age += 1", "pass", by_all_kinds_of_requests),
    "tokens to compute are counted wrong": Bug(
        StepInFlight,
        "foresee",
        "queues.num_uncomputed_tokens += sequence.num_uncomputed_tokens - num_before",
        "pass",
        by_all_kinds_of_requests,
    ),
    "an abort counts the pending token": Bug(
        Sequence, "last_delta", "self.num_output_tokens - self.is_pending", "self.num_output_tokens", by_random_orders
    ),
    "the first token does not say what was cached": Bug(
        Sequence,
        "_fill_in",
        "self.num_cached_tokens if index == 0",
        "self.num_cached_tokens if index < 0",
        test_two_plans.test_the_first_token_says_what_was_cached_and_how_long_it_waited,
    ),
    "a stop token is not looked at": Bug(
        Sequence, "_fill_in", "self.finish_reason,", "None,", by_all_kinds_of_requests
    ),
    "a broken row counts as drawn": Bug(
        Sequence,
        "_fill_in",
        "if token_id < 0 and self._breaks(token_id):",
        "if False:",
        test_two_plans_ends.test_who_has_no_numbers_fails_alone_and_its_blocks_are_found_by_nobody,
    ),
    "the engine sleeps over a step in flight": Bug(
        Scheduler,
        "has_work",
        "self._sequences or self._in_flight",
        "self._sequences",
        test_two_plans_ends.test_blocks_of_who_has_ended_are_free_once_the_step_ahead_is_done,
    ),
    "the engine ends with steps in flight": Bug(
        Engine,
        "_run",
        "self._land()",
        "pass",
        test_two_plans_on_a_thread.test_stopping_with_two_plans_in_flight_answers_everyone_and_collects_both,
    ),
    "weights are changed under a step": Bug(
        Engine,
        "_settle",
        "self._land()",
        "pass",
        test_two_plans_on_a_thread.test_what_is_done_between_steps_finds_no_step_in_flight,
    ),
    "a step is run in turn after all": Bug(
        Engine,
        "_launch_steps",
        "self._steps.can_go_ahead() and",
        "False and",
        lambda: test_two_plans.test_the_host_works_while_the_device_runs(1.0, 0.5),
    ),
    "a step is timed from its launch": Bug(
        StepsInFlight,
        "collect",
        "if self.plans:",
        "if False:",
        test_two_plans.test_each_step_is_timed_from_its_turn_on_the_device_and_progress_is_expected_of_that_one,
    ),
}


def plant(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function again, from a source with the bug in it."""
    held = inspect.getattr_static(bug.owner, bug.name)
    function = held.fget if isinstance(held, property) else held
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(bug.right) == 1, "there is one place for it"
    scope: dict[str, Any] = {}
    exec(source.replace(bug.right, bug.wrong), sys.modules[function.__module__].__dict__, scope)
    monkeypatch.setattr(bug.owner, bug.name, scope[function.__name__])
    if bug.owner is pending_tokens and bug.name == "with_tokens":
        monkeypatch.setattr(fake_device, "with_tokens", scope[function.__name__])


def is_found(bug: Bug) -> bool:
    try:
        bug.found()
    except (Exception, pytest.fail.Exception):  # whatever a test fails with
        return True
    return False


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name, monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "MAX_PROMPT_LOGPROBS", MAX_PROMPT_LOGPROBS)
    monkeypatch.setattr(planned_step, "MAX_SHARE_HELD_UP", 1.0)
    bug = BUGS[name]
    plant(bug, monkeypatch)
    assert is_found(bug)


def test_without_a_bug_nothing_is_found(monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "MAX_PROMPT_LOGPROBS", MAX_PROMPT_LOGPROBS)
    monkeypatch.setattr(planned_step, "MAX_SHARE_HELD_UP", 1.0)
    for found in {id(bug.found): bug.found for bug in BUGS.values()}.values():
        found()

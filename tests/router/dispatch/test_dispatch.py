"""The dispatch core, event by event: no mocks, no sleeps, time moved by hand."""

from holdfast.router.generation import Usage
from holdfast.worker.errors import (
    InternalError,
)
from holdfast.worker.request import FinishReason
from tests.router.core import aborts, delivered, delta, failure, queueing_core, sent

# --- output ---


def test_output_flows_from_submission_to_the_last_word(core):
    attempt = sent(core.submit("x")).attempt
    first = delivered(core.step(delta(attempt, 0, 0, 1)))
    assert (first.first_token_index, first.token_ids, first.text, first.finish_reason) == (0, (0, 1), "a", None)
    last = delivered(core.step(delta(attempt, 2, 2, finish=FinishReason.LENGTH)))
    assert (last.first_token_index, last.token_ids, last.text, last.finish_reason) == (2, (2,), "bc", "length")
    assert last.usage == Usage(num_prompt_tokens=3, num_completion_tokens=3)
    assert core.dispatch.num_open == 0
    assert core.dispatch.next_tick is None


def test_one_step_carries_many_requests(core):
    attempts = [sent(core.submit(name)).attempt for name in ("x", "y")]
    actions = core.step(*(delta(attempt, 0, 5) for attempt in attempts))
    assert [action.request_id for action in actions] == ["x", "y"]


def test_a_finish_without_tokens_is_a_last_word(core):
    attempt = sent(core.submit("x")).attempt
    core.step(delta(attempt, 0, 0, 1))
    last = delivered(core.step(delta(attempt, 2, finish=FinishReason.LENGTH)))
    assert (last.token_ids, last.text) == ((), "b")


def test_tokens_that_were_seen_are_dropped(core):
    attempt = sent(core.submit("x")).attempt
    core.step(delta(attempt, 0, 0, 1))
    assert core.step(delta(attempt, 0, 0, 1)) == []
    assert core.step(delta(attempt, 1)) == []
    assert delivered(core.step(delta(attempt, 1, 1, 2, 3))).token_ids == (2, 3)


def test_a_gap_is_our_bug_and_ends_this_request_alone(core):
    x, y = (sent(core.submit(name)).attempt for name in ("x", "y"))
    actions = core.step(delta(x, 1, 9), delta(y, 0, 5))
    assert isinstance(failure(actions).error, InternalError)
    assert "1 output tokens are missing" in str(failure(actions).error)
    assert aborts(actions) == [("r", x)]
    assert delivered(actions).request_id == "y"


def test_a_text_state_that_breaks_ends_its_request_alone(core, caplog):
    x, y = (sent(core.submit(name)).attempt for name in ("x", "y"))
    actions = core.step(delta(x, 0, "not a token"), delta(y, 0, 5))
    assert isinstance(failure(actions).error, InternalError)
    assert aborts(actions) == [("r", x)]
    assert delivered(actions).request_id == "y"
    assert "request x" in caplog.text


def test_a_stop_string_ends_the_output_and_frees_the_replica(core):
    attempt = sent(core.submit("x", stop_at=4)).attempt
    actions = core.step(delta(attempt, 0, 3, 4, 5))
    last = delivered(actions)
    assert (last.token_ids, last.text, last.finish_reason) == ((3, 4), "de", "stop")
    assert last.usage == Usage(num_prompt_tokens=3, num_completion_tokens=2)
    assert aborts(actions) == [("r", attempt)]
    assert core.step(delta(attempt, 3, 6)) == []


def test_a_stop_string_in_the_last_delta_needs_no_abort(core):
    attempt = sent(core.submit("x", stop_at=4)).attempt
    actions = core.step(delta(attempt, 0, 3, 4, 5, finish=FinishReason.LENGTH))
    assert delivered(actions).finish_reason == "stop"
    assert aborts(actions) == []


# --- attempts as fences ---


def test_every_submission_is_a_new_attempt(core):
    attempts = [sent(core.submit(name)).attempt for name in ("x", "y")]
    core.cancel("x")
    attempts.append(sent(core.submit("x")).attempt)
    assert len(set(attempts)) == 3


def test_a_late_answer_to_an_old_attempt_is_dropped(core):
    old = sent(core.submit("x")).attempt
    core.cancel("x")
    new = sent(core.submit("x")).attempt
    assert core.step(delta(old, 0, 9, finish=FinishReason.ABORT)) == []
    assert delivered(core.step(delta(new, 0, 1))).token_ids == (1,)


def test_another_replica_cannot_speak_for_an_attempt(core):
    attempt = sent(core.submit("x")).attempt
    core.up("other")
    assert core.step(delta(attempt, 0, 9), replica_id="other") == []


def test_news_of_a_replica_that_is_not_up_is_dropped(core):
    attempt = sent(core.submit("x")).attempt
    core.down()
    assert core.step(delta(attempt, 0, 9)) == []


def test_an_attempt_goes_on_after_the_tokens_so_far(core):
    """What a second attempt would be asked: the state alone is enough to carry on."""
    attempt = sent(core.submit("x")).attempt
    core.step(delta(attempt, 0, 4, 5))
    state = core.dispatch._requests[core.key("x")]
    assert state.continuation().output_token_ids == (4, 5)


# --- cancel ---


def test_a_cancel_reaches_the_replica_at_once(core):
    attempt = sent(core.submit("x")).attempt
    assert aborts(core.cancel("x")) == [("r", attempt)]
    assert core.dispatch.num_open == 0


def test_a_cancelled_request_leaves_the_queue_without_a_trace():
    core = queueing_core()
    core.submit("x")
    assert core.cancel("x") == []
    assert core.dispatch.num_queued == 0


def test_cancelling_what_is_over_does_nothing(core):
    attempt = sent(core.submit("x")).attempt
    core.step(delta(attempt, 0, 1, finish=FinishReason.STOP))
    assert core.cancel("x") == []
    assert core.cancel("never heard of") == []


# --- abort ---


def test_an_abort_ends_a_request_after_what_it_has_and_reaches_the_replica_at_once(core):
    attempt = sent(core.submit("x")).attempt
    core.step(delta(attempt, 0, 4, 5))
    actions = core.abort("x")
    last = delivered(actions)
    assert (last.finish_reason, last.first_token_index, last.token_ids) == (FinishReason.ABORT, 2, ())
    assert last.usage.num_completion_tokens == 2
    assert aborts(actions) == [("r", attempt)]
    assert core.dispatch.num_open == 0
    assert core.step(delta(attempt, 2, 6)) == [], "what is still on its way does nothing"


def test_an_aborted_request_leaves_the_queue_and_says_so():
    core = queueing_core()
    core.submit("x")
    actions = core.abort("x")
    assert (delivered(actions).finish_reason, aborts(actions)) == (FinishReason.ABORT, [])
    assert core.dispatch.num_queued == 0


def test_an_abort_makes_room_for_who_waits():
    core = queueing_core()
    core.submit("x")
    assert sent(core.abort("running")).request.request_id == "x"


def test_aborting_what_is_over_does_nothing(core):
    core.submit("x")
    core.cancel("x")
    assert core.abort("x") == []
    assert core.abort("never heard of") == []

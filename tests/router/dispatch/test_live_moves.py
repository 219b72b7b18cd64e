"""Live moves: blocks go ahead of the requests of a retiring replica, which run on meanwhile; and what ends the wait."""

import pytest

from holdfast.router.dispatch import live_moves
from holdfast.router.events import Action, SendAbort, SendAhead, SendSubmit
from holdfast.worker.request import BlockSource, EngineLoad, FinishReason
from holdfast.worker.step_update import FetchedAhead, StepUpdate
from tests.router.core import Core, delta, load, sent
from tests.router.dispatch.test_block_sources import retire, up

MIB = 1 << 20
FULL = EngineLoad(num_running=1, num_waiting=0, num_waiting_tokens=0, num_free_blocks=0, num_total_blocks=9)
"""144 tokens in use: of a MiB each, 0.15 s at 1 GB/s."""


def running(num_prompt_tokens: int = 50, **changes: object) -> tuple[Core, SendSubmit, str]:
    """A request with three tokens of output, and the replica without it."""
    core = Core()
    for name in "ab":
        up(core, name, **{"kv_bytes_per_token": MIB, **changes})
    attempt = sent(core.submit("one", num_prompt_tokens=num_prompt_tokens))
    core.step(delta(attempt.attempt, 0, 1, 2, 3), replica_id=attempt.replica_id, load=FULL)
    return core, attempt, {"a": "b", "b": "a"}[attempt.replica_id]


def told(core: Core, replica_id: str, attempt: int, num_tokens: int) -> list[Action]:
    """The replica has fetched blocks."""
    update = StepUpdate(load=load(), fetched_ahead=[FetchedAhead(attempt, num_tokens)])
    return core._checked(core.dispatch.step(replica_id, update, core.now))


def says(core: Core, attempt: SendSubmit, first: int, *token_ids: int) -> list[Action]:
    """A request gets these tokens of its output, from number `first` on."""
    return core.step(delta(attempt.attempt, first, *token_ids), replica_id=attempt.replica_id, load=FULL)


def ahead(actions: list[Action]) -> list[SendAhead]:
    return [action for action in actions if isinstance(action, SendAhead)]


def test_blocks_go_first_and_the_request_runs_on_until_they_are_there():
    core, attempt, other = running()
    (action,) = ahead(retire(core, attempt.replica_id))
    assert (action.replica_id, action.attempt) == (other, attempt.attempt)
    source = action.request.block_source
    assert source == BlockSource(f"{attempt.replica_id}:1", 53, is_computing=True, is_leaving=True)
    assert action.request.output_token_ids == (1, 2, 3)
    step = says(core, attempt, 3, 4)
    assert not [one for one in step if isinstance(one, SendSubmit | SendAbort | SendAhead)], "it runs on"
    assert not told(core, other, attempt.attempt, 48), "its client waits from its next token on"
    moved = says(core, attempt, 4, 5)
    submission = sent(moved)
    assert submission.replica_id == other
    assert submission.request.output_token_ids == (1, 2, 3, 4, 5)
    assert submission.request.block_source is None, "its blocks are there"
    assert [one.attempt for one in moved if isinstance(one, SendAbort)] == [attempt.attempt]


def test_a_replica_with_less_than_was_sent_names_the_source_again():
    core, attempt, other = running()
    retire(core, attempt.replica_id)
    told(core, other, attempt.attempt, 16)
    moved = sent(says(core, attempt, 3, 4))
    assert moved.request.block_source == BlockSource(f"{attempt.replica_id}:1", 54)


@pytest.mark.parametrize("num_tokens", [22, 48])
def test_the_last_two_blocks_are_computed(num_tokens):
    core, attempt, other = running()
    retire(core, attempt.replica_id)
    told(core, other, attempt.attempt, num_tokens)
    assert sent(says(core, attempt, 3, 4)).request.block_source is None


def test_blocks_of_the_tokens_that_came_meanwhile_are_copied_too_and_only_a_few_times():
    core, attempt, other = running()
    retire(core, attempt.replica_id)
    num_output = 3
    for number in range(2, live_moves.MAX_ROUNDS + 2):
        told(core, other, attempt.attempt, 50 + num_output)
        actions = says(core, attempt, num_output, *range(num_output, num_output + 33))
        num_output += 33
        if number <= live_moves.MAX_ROUNDS:
            (again,) = ahead(actions)
            assert (again.replica_id, again.request.block_source.num_tokens) == (other, 50 + num_output)
    assert (ahead(actions), sent(actions).request.block_source) == ([], None)


def test_a_request_that_gets_no_token_moves_without_it():
    core, attempt, other = running()
    retire(core, attempt.replica_id)
    told(core, other, attempt.attempt, 48)
    core.now += live_moves.MAX_TOKEN_S + 0.1
    assert sent(core.step(replica_id=other)).replica_id == other


def test_a_request_waits_for_its_blocks_no_longer_than_the_limit():
    core, attempt, other = running()
    retire(core, attempt.replica_id)
    core.now += live_moves.MAX_COPY_S - 0.1
    assert not core.step(replica_id=attempt.replica_id, load=FULL)
    core.now += 0.2
    moved = sent(core.step(replica_id=attempt.replica_id, load=FULL))
    assert (moved.replica_id, moved.request.block_source is None) == (other, False)


def test_where_the_other_replica_is_lost_meanwhile_a_third_one_takes_the_request():
    core, attempt, other = running()
    retire(core, attempt.replica_id)
    up(core, "c", kv_bytes_per_token=MIB)
    assert sent(core.down(other)).replica_id == "c"


def test_the_loss_of_the_retiring_replica_ends_the_wait():
    core, attempt, other = running()
    retire(core, attempt.replica_id)
    assert sent(core.down(attempt.replica_id)).replica_id == other
    assert not told(core, other, attempt.attempt, 48)


def test_a_replica_that_is_called_back_keeps_its_requests():
    core, attempt, other = running()
    retire(core, attempt.replica_id)
    core.dispatch.replica_retiring(attempt.replica_id, False, core.now)
    assert not told(core, other, attempt.attempt, 48)
    assert not says(core, attempt, 3, 4)[1:]
    (again,) = ahead(retire(core, attempt.replica_id))
    assert again.request.output_token_ids == (1, 2, 3, 4), "what was copied then does not count"


def test_small_and_foreign_blocks_and_states_do_not_go_ahead():
    for changes in ({"kv_bytes_per_token": 100}, {"num_state_slots": 4}, {"transfers_blocks": False}):
        core, attempt, other = running(**changes)
        actions = retire(core, attempt.replica_id)
        assert (ahead(actions), sent(actions).replica_id) == ([], other), changes


def test_a_request_without_output_moves_at_once():
    core = Core()
    for name in "ab":
        up(core, name, kv_bytes_per_token=MIB)
    attempt = sent(core.submit("one", num_prompt_tokens=50))
    core.step(replica_id=attempt.replica_id, load=FULL)
    actions = retire(core, attempt.replica_id)
    assert (ahead(actions), sent(actions).replica_id != attempt.replica_id) == ([], True)


def several(num_requests: int, bytes_per_token: int = MIB) -> tuple[Core, dict[int, SendSubmit], str]:
    """Requests with three tokens of output on one replica, by their attempts, and the replica without them."""
    core = Core()
    up(core, "a", kv_bytes_per_token=bytes_per_token)
    attempts = [sent(core.submit(f"one{number}", num_prompt_tokens=50)) for number in range(num_requests)]
    for attempt in attempts:
        core.step(delta(attempt.attempt, 0, 1, 2, 3), replica_id="a", load=FULL)
    up(core, "b", kv_bytes_per_token=bytes_per_token)
    return core, {one.attempt: one for one in attempts}, "b"


def test_few_requests_are_copied_at_a_time_and_the_others_as_far_as_they_have_come_by_then():
    core, attempts, other = several(4)
    first, second, third, fourth = attempts
    actions = retire(core, "a")
    assert [one.attempt for one in ahead(actions)] == [first, second]
    assert not [one for one in actions if isinstance(one, SendSubmit | SendAbort)], "all run on"
    assert not says(core, attempts[third], 3, 4)[1:], "it runs on"
    told(core, other, first, 48)
    moved = says(core, attempts[first], 3, 4)
    assert sent(moved).request.request_id == "one0"
    (begun,) = ahead(moved)
    assert (begun.attempt, begun.request.output_token_ids) == (third, (1, 2, 3, 4))
    ended = core.step(delta(second, 3, 4, finish=FinishReason.STOP), replica_id="a", load=FULL)
    assert [one.attempt for one in ahead(ended)] == [fourth], "a request that has ended counts no longer"


def test_more_are_copied_at_a_time_while_all_are_moved_soon():
    kib_160 = MIB * 5 // 32  # a request takes 9 ms, and what is in use 23
    core, attempts, _ = several(5, kib_160)
    assert [one.attempt for one in ahead(retire(core, "a"))] == list(attempts)[:3]


def test_those_that_were_not_copied_in_time_move_with_the_blocks_that_are_there():
    core, _, other = several(4)
    retire(core, "a")
    core.now += live_moves.MAX_COPY_S + 0.1
    moved = [one for one in core.step(replica_id="a", load=FULL) if isinstance(one, SendSubmit)]
    assert [(one.replica_id, one.request.block_source is None) for one in moved] == [(other, False)] * 4

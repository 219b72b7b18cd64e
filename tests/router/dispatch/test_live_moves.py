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


def ahead(actions: list[Action]) -> list[SendAhead]:
    return [action for action in actions if isinstance(action, SendAhead)]


def test_blocks_go_first_and_the_request_runs_on_until_they_are_there():
    core, attempt, other = running()
    (action,) = ahead(retire(core, attempt.replica_id))
    assert (action.replica_id, action.attempt) == (other, attempt.attempt)
    source = action.request.block_source
    assert source == BlockSource(f"{attempt.replica_id}:1", 53, is_computing=True, is_leaving=True)
    assert action.request.output_token_ids == (1, 2, 3)
    step = core.step(delta(attempt.attempt, 3, 4), replica_id=attempt.replica_id, load=FULL)
    assert not [one for one in step if isinstance(one, SendSubmit | SendAbort | SendAhead)], "it runs on"
    moved = told(core, other, attempt.attempt, 48)
    submission = sent(moved)
    assert submission.replica_id == other
    assert submission.request.output_token_ids == (1, 2, 3, 4)
    assert submission.request.block_source is None, "its blocks are there"
    assert [one.attempt for one in moved if isinstance(one, SendAbort)] == [attempt.attempt]


def test_a_replica_with_less_than_was_sent_names_the_source_again():
    core, attempt, other = running()
    retire(core, attempt.replica_id)
    moved = sent(told(core, other, attempt.attempt, 16))
    assert moved.request.block_source == BlockSource(f"{attempt.replica_id}:1", 53)


@pytest.mark.parametrize("num_tokens", [21, 48])
def test_the_last_two_blocks_are_computed(num_tokens):
    core, attempt, other = running()
    retire(core, attempt.replica_id)
    assert sent(told(core, other, attempt.attempt, num_tokens)).request.block_source is None


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


def test_beyond_the_bound_requests_move_at_once_and_ended_ones_do_not_count(monkeypatch):
    monkeypatch.setattr(live_moves, "MAX_COPIES", 1)
    core, attempt, other = running()
    retire(core, other)
    second = sent(core.submit("two", num_prompt_tokens=50))
    core.dispatch.replica_retiring(other, False, core.now)
    core.step(delta(second.attempt, 0, 1), replica_id=second.replica_id, load=FULL)
    actions = retire(core, attempt.replica_id)
    assert [one.attempt for one in ahead(actions)] == [attempt.attempt]
    assert sent(actions).request.output_token_ids == (1,)
    core.step(delta(attempt.attempt, 3, 4, finish=FinishReason.STOP), replica_id=attempt.replica_id)
    core.dispatch.replica_retiring(attempt.replica_id, False, core.now)
    moved = sent(actions)
    core.step(delta(moved.attempt, 1, 5), replica_id=other, load=FULL)
    assert [one.attempt for one in ahead(retire(core, other))] == [moved.attempt]

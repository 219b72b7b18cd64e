"""Counts of the dispatcher, by a clock that is moved by hand: waits by class, failovers by cause, pauses, replays."""

import pytest

from holdfast.router.dispatch.request_stats import IN_REPLICA, IN_ROUTER
from holdfast.worker.errors import QueueFullError
from holdfast.worker.request import FinishReason, Priority, TokenDelta
from holdfast.worker.step_update import Rejection
from tests.router.core import Core, delta, sent, two_replicas


@pytest.fixture
def core() -> Core:
    return two_replicas()


def told(core: Core, name: str) -> dict:
    """Number and sum of a histogram, by its labels."""
    return {key: (one.num_values, one.total) for key, one in getattr(core.dispatch.stats, name).items()}


def test_a_lost_replica_makes_a_failover_a_pause_and_tokens_to_replay(core):
    first = sent(core.submit("x", priority=Priority.HIGH))
    core.now += 2
    core.step(TokenDelta(first.attempt, 0, (0, 1), queued_s=0.5), replica_id="a")
    core.now += 3
    again = sent(core.down("a"))
    core.now += 4
    core.step(TokenDelta(again.attempt, 2, (2,), FinishReason.LENGTH, queued_s=1.0), replica_id="b")
    stats = core.dispatch.stats
    assert dict(stats.failovers) == {("m", "lost"): 1}
    assert dict(stats.replayed_tokens) == {"m": 2}
    assert dict(stats.replicas_lost) == {"m": 1}
    assert told(core, "pause_s") == {"m": (1, 4.0)}
    assert told(core, "queue_s") == {("m", "high", IN_ROUTER): (1, 0.0), ("m", "high", IN_REPLICA): (2, 1.5)}


def test_a_wait_in_the_router_ends_where_a_replica_comes_up():
    core = Core()
    core.up("a")
    core.down("a")
    core.submit("x", priority=Priority.LOW, tenant="gold")
    assert dict(core.dispatch.waiting()) == {("m", "low", "gold"): 1}
    core.now += 7
    sent(core.up("b"))
    assert told(core, "queue_s") == {("m", "low", IN_ROUTER): (1, 7.0)}
    assert not core.dispatch.waiting()


def test_a_loss_before_the_first_token_is_no_pause(core):
    sent(core.submit("x"))
    again = sent(core.down("a"))
    core.now += 4
    core.step(delta(again.attempt, 0, 2), replica_id="b")
    assert told(core, "pause_s") == {}
    assert not core.dispatch.stats.replayed_tokens


def test_what_a_full_replica_returns_and_what_a_leaving_one_gives_away_have_causes_of_their_own(core):
    first = sent(core.submit("x"))
    full = Rejection(attempt=first.attempt, error=QueueFullError("full", 1.0))
    core.step(rejections=[full], replica_id="a")
    assert dict(core.dispatch.stats.failovers) == {("m", "returned"): 1}
    core.tick(after_s=5)
    core.up("c")
    core.dispatch.replica_retiring("b", True, core.now)
    assert core.dispatch.stats.failovers["m", "moved"] == 1
    core.down("b")
    assert not core.dispatch.stats.replicas_lost  # it was leaving


def test_a_resumed_request_replays_what_its_client_has(core):
    sent(core.submit("x", output=(1, 2, 3)))
    assert dict(core.dispatch.stats.replayed_tokens) == {"m": 3}
    assert not core.dispatch.stats.failovers


def test_deliveries_say_which_replica_they_are_from(core):
    first = sent(core.submit("x"))
    (one,) = core.step(delta(first.attempt, 0, 0), replica_id="a")
    again = sent(core.down("a"))
    (two,) = core.step(delta(again.attempt, 1, 1), replica_id="b")
    assert (one.replica_id, two.replica_id) == ("a", "b")

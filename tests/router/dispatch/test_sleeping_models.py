"""Models that are without replicas by decision: requests wait for a cold start, bounded; and demand."""

import pytest

from holdfast.router.config import LimitsConfig, RouterConfig
from holdfast.worker.errors import InvalidRequestError, QueueFullError, ReplicaError, RequestAbortedError
from holdfast.worker.step_update import Rejection
from tests.router.core import Core, delta, failure, load, sent


def asleep(max_queued: int = 8) -> Core:
    """A model that was served, went to rest, and has been there for long."""
    core = Core(RouterConfig(replica_wait_s=5.0), LimitsConfig(max_queued=max_queued))
    core.up("r")
    core.dispatch.models_asleep({"m": 60.0})
    core.down("r")
    core.now += 1000.0
    return core


def test_requests_wait_for_the_cold_start_and_are_served():
    core = asleep()
    assert core.submit("x", timeout_s=500) == []
    assert core.tick(59.0) == []
    assert sent(core.up("r2")).request.request_id == "x"


def test_the_wait_begins_with_the_first_request_and_ends_with_a_clear_refusal():
    core = asleep()
    core.submit("x", timeout_s=500)
    core.now += 30.0
    core.submit("y", timeout_s=500)
    assert core.dispatch.next_tick == pytest.approx(core.now + 30.0)
    actions = core.tick(30.0)
    assert [action.request_id for action in actions] == ["x", "y"]
    assert "none has started within 60 s (scaling.cold_start_wait_s)" in str(failure(actions[:1]).error)
    assert core.submit("z", timeout_s=500) == [], "the next request tries again"
    assert core.dispatch.next_tick == pytest.approx(core.now + 60.0)


def test_no_more_wait_than_the_queue_holds():
    core = asleep(max_queued=2)
    core.submit("x")
    core.submit("y")
    with pytest.raises(QueueFullError):
        core.submit("z")


def test_a_model_that_is_meant_to_be_up_is_refused_as_before():
    core = Core(RouterConfig(replica_wait_s=5.0))
    core.up("r")
    core.down("r")
    core.now += 6.0
    with pytest.raises(ReplicaError, match="no replica of model 'm' is up"):
        core.submit("x")


def test_the_demand_is_what_the_tables_hold():
    core = Core(RouterConfig(max_waiting_per_replica=1))
    core.up("r", load=load(num_running=2, num_waiting=1))
    first = sent(core.submit("x")).attempt
    core.submit("y", num_prompt_tokens=5)
    core.now += 2.0
    core.step(delta(first, 0, 0, 1), load=load(num_running=3, num_waiting=1))
    (demand,) = core.dispatch.demands(core.now + 1.0)
    assert (demand.model, demand.num_open, demand.num_queued, demand.num_queued_tokens) == ("m", 2, 1, 5)
    assert (demand.num_arrived, demand.num_first_tokens, demand.ttft_s, demand.longest_wait_s) == (2, 1, 2.0, 3.0)
    (replica,) = demand.replicas
    assert (replica.replica_id, replica.num_running, replica.num_waiting) == ("r", 3, 1)
    core.dispatch.replica_retiring("r", True, core.now)
    assert core.dispatch.demands(core.now)[0].replicas == (), "a retiring replica takes nothing new"


def counts(core: Core) -> tuple[int, int, int]:
    (demand,) = core.dispatch.demands(core.now)
    return demand.num_arrived, demand.num_first_tokens, demand.num_left


def test_a_request_that_goes_on_after_tokens_of_another_router_is_no_arrival():
    core = Core()
    core.up("r")
    attempt = sent(core.submit("x", output=(5, 6), client_attempt=2)).attempt
    assert counts(core) == (0, 0, 0)
    core.step(delta(attempt, 2, 7))
    assert counts(core) == (0, 0, 0)
    core.cancel("x")
    assert counts(core) == (0, 0, 0)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("cancel", (0, 0, 1)),
        ("abort", (0, 0, 1)),
        ("hand over", (0, 0, 1)),
        ("submit again", (1, 0, 1)),
        ("refused as invalid", (0, 0, 1)),
        ("deadline", (1, 0, 0)),
        ("first token, then cancel", (1, 1, 0)),
        ("lost with its replica", (1, 0, 0)),
    ],
)
def test_who_leaves_before_the_first_token_is_counted_as_that_and_what_fails_stays_demand(end, expected):
    core = Core()
    core.up("r")
    attempt = sent(core.submit("x", timeout_s=9.0, client_attempt=1)).attempt
    match end:
        case "cancel":
            core.cancel("x")
        case "abort":
            core.abort("x")
        case "hand over":
            core.dispatch.hand_over(RequestAbortedError("stopping"))
        case "submit again":
            core.supersede("x", 2)
            core.submit("x", client_attempt=2)
        case "refused as invalid":
            core.step(rejections=(Rejection(attempt=attempt, error=InvalidRequestError("top_k", 3, "is refused")),))
        case "deadline":
            core.tick(10.0)
        case "first token, then cancel":
            core.step(delta(attempt, 0, 7))
            core.cancel("x")
        case "lost with its replica":
            core.down("r")
            core.up("s")
    assert counts(core) == expected

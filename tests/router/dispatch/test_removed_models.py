"""Models that are taken away while the router runs: new requests are refused by name, what runs may finish."""

import pytest

from holdfast.router.generation import OutputDelta
from holdfast.worker.errors import ReplicaError, UnknownModelError
from holdfast.worker.request import FinishReason
from tests.router.core import Core, aborts, delivered, delta, failure, sent


@pytest.fixture
def core() -> Core:
    """One replica of "m" and one of "other"."""
    core = Core()
    core.up("a", "m")
    core.up("b", "other")
    return core


def test_a_removed_model_is_unknown_and_the_refusal_names_the_others(core):
    core.remove_models("m")
    with pytest.raises(UnknownModelError, match=r"'m' is not served here; served: other$"):
        core.submit("x", model="m")
    assert [status.name for status in core.dispatch.models()] == ["other"]
    assert sent(core.submit("y", model="other")).replica_id == "b"


def test_what_runs_goes_on_to_its_end(core):
    first = sent(core.submit("x"))
    assert core.remove_models("m") == []
    core.dispatch.replica_retiring("a", True, core.now)
    last = delivered(core.step(delta(first.attempt, 0, 1, finish=FinishReason.LENGTH), replica_id="a"))
    assert last.finish_reason is FinishReason.LENGTH


def test_what_waits_for_it_ends_at_once_and_by_name(core):
    core.down("a")
    core.submit("x")
    error = failure(core.remove_models("m")).error
    assert isinstance(error, UnknownModelError)
    assert "'m'" in str(error)


def test_what_loses_its_last_replica_ends_by_name_and_not_after_a_wait(core):
    first = sent(core.submit("x"))
    core.step(delta(first.attempt, 0, 1), replica_id="a")
    core.remove_models("m")
    assert isinstance(failure(core.down("a")).error, UnknownModelError)
    assert core.dispatch.num_open == 0


def test_what_loses_one_of_its_replicas_goes_on_at_another(core):
    first = sent(core.submit("x"))
    core.up("c", "m")
    core.remove_models("m")
    assert sent(core.down("a", ReplicaError("gone"))).replica_id == "c"
    assert first.replica_id == "a"


def test_cancelling_frees_the_replica_of_a_removed_model(core):
    first = sent(core.submit("x"))
    core.remove_models("m")
    assert aborts(core.cancel("x")) == [("a", first.attempt)]


def test_a_model_that_is_served_again_is_known_again(core):
    core.remove_models("m")
    core.down("a")
    core.remove_models()
    core.up("new", "m")
    assert sent(core.submit("x")).replica_id == "new"
    assert not any(isinstance(action, OutputDelta) for action in core.tick())
